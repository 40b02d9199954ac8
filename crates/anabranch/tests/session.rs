//! `run --session` and `run --prefix-store`, from outside.

mod common;

use std::path::Path;

use common::{Golden, error_line, json, run, stderr, stdout};
use serde_json::Value;

const TEXT: &str = "The captain looked out over the grey water and";

fn with<'a>(common: &[&'a str], more: &[&'a str]) -> Vec<&'a str> {
    ["run"].iter().chain(common).chain(more).copied().collect()
}

fn ids(json: &Value) -> Vec<u64> {
    json["ids"]
        .as_array()
        .unwrap()
        .iter()
        .map(|id| id.as_u64().unwrap())
        .collect()
}

#[test]
fn a_text_goes_on_with_the_same_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("s");
    let file = file.to_str().unwrap();
    let raw = ["--raw", "--json", "--temperature", "0"];
    let whole = json(&run(with(&raw, &["--prompt", TEXT, "--max-tokens", "15"])));
    let first = json(&run(with(
        &raw,
        &["--prompt", TEXT, "--max-tokens", "6", "--session", file],
    )));
    assert_eq!(first["stats"]["session_tokens_restored"], 0);
    let second = run(with(&raw, &["--max-tokens", "4", "--session", file]));
    assert!(stderr(&second).contains("tokens restored"), "{}", stderr(&second));
    let second = json(&second);
    let prompt = first["prompt_ids"].as_array().unwrap().len() as u64;
    assert_eq!(second["stats"]["session_tokens_restored"], prompt + 5);
    assert_eq!(
        second["stats"]["prompt_tokens"], 1,
        "the last token, chosen but not fed"
    );
    let third = json(&run(with(&raw, &["--max-tokens", "5", "--session", file])));
    assert_eq!([ids(&first), ids(&second), ids(&third)].concat(), ids(&whole));
    // More text in between, as one text.
    let more = json(&run(with(
        &raw,
        &["--prompt", " Then", "--max-tokens", "3", "--session", file],
    )));
    let all: Vec<String> = [&whole["prompt_ids"], &whole["ids"]]
        .into_iter()
        .chain([&more["prompt_ids"]])
        .flat_map(|ids| ids.as_array().unwrap().clone())
        .map(|id| id.to_string())
        .collect();
    let pending = ids(&whole).last().unwrap().to_string();
    // The pending token stands at the end of the one and at the beginning of the other.
    let at = all.len() - more["prompt_ids"].as_array().unwrap().len();
    assert_eq!((&all[at - 1], &all[at]), (&pending, &pending));
    let all = [&all[..at - 1], &all[at..]].concat().join(",");
    let straight = json(&run(with(&["--json", "--max-tokens", "3"], &["--ids", &all])));
    assert_eq!(ids(&straight), ids(&more));
}

#[test]
fn a_conversation_goes_on_and_says_what_it_spared() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("s");
    let session = ["--session", file.to_str().unwrap(), "--max-tokens", "40"];
    let first = run(with(&session, &["--prompt", "What is the capital of France?"]));
    assert!(stdout(&first).contains("Paris"), "{}", stdout(&first));
    let second = run(with(&session, &["--prompt", "And of Italy?", "--stats"]));
    assert!(second.status.success(), "{}", stderr(&second));
    let side = stderr(&second);
    assert!(side.contains(&format!("session {}: ", file.display())), "{side}");
    assert!(side.contains("  session      "), "what was restored was used:\n{side}");
}

#[test]
fn what_does_not_fit_is_refused_before_work_begins() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("s");
    let file = file.to_str().unwrap();
    let golden = Golden::read("k3_a");
    let model = ["--model", golden.model(), "--session", file, "--max-tokens", "2"];
    assert!(run(with(&model, &["--ids", "5,6,7"])).status.success());
    let line = error_line(&run(with(&model, &["--prompt", "x"])));
    assert!(line.contains("found plain text, expected a conversation"), "{line}");
    let line = error_line(&run(with(&["--session", file], &["--ids", "5"])));
    assert!(
        line.contains(file) && line.contains("a model whose config.json"),
        "{line}"
    );
    let line = error_line(&run(with(&model, &["--ids", "5", "--kv", "bf16"])));
    assert!(line.contains("found latents in f32, expected bf16"), "{line}");
    let line = error_line(&run(with(&model, &["--ids", "5", "--context", "4"])));
    assert!(line.contains("--context"), "{line}");
    let whole = std::fs::read(file).unwrap();
    let mut damaged = whole.clone();
    *damaged.last_mut().unwrap() ^= 1;
    std::fs::write(file, &damaged).unwrap();
    let line = error_line(&run(with(&model, &["--ids", "5"])));
    assert!(line.contains("the file is damaged"), "{line}");
    assert_eq!(std::fs::read(file).unwrap(), damaged, "a refused file is left alone");
    std::fs::write(
        file,
        "something else of at least sixty-four bytes, so that a header could be in it",
    )
    .unwrap();
    let line = error_line(&run(with(&model, &["--ids", "5"])));
    assert!(line.contains("found no session file"), "{line}");
    let talk = dir.path().join("t");
    let talk = [
        "--model",
        golden.model(),
        "--session",
        talk.to_str().unwrap(),
        "--max-tokens",
        "2",
    ];
    assert!(
        run(with(&talk, &["--prompt", "x", "--system", "Be brief."]))
            .status
            .success()
    );
    assert!(run(with(&talk, &["--prompt", "y"])).status.success());
    let other = run(with(&talk, &["--prompt", "z", "--system", "Be long."]));
    assert_eq!(other.status.code(), Some(2));
    assert!(
        stderr(&other).contains("began with other instructions"),
        "{}",
        stderr(&other)
    );
}

#[test]
#[cfg(target_os = "linux")]
fn ctrl_c_saves_what_there_is() {
    use std::io::Read;
    use std::process::Stdio;
    let endless = common::endless();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("s");
    let args = [
        "--model",
        endless.path().to_str().unwrap(),
        "--raw",
        "--session",
        file.to_str().unwrap(),
    ];
    let mut child = common::anabranch(with(&args, &["--prompt", "hello", "--max-tokens", "3000"]))
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    // Some tokens have come.
    child.stdout.as_mut().unwrap().read_exact(&mut [0; 8]).unwrap();
    let line = error_line(&run(with(&args, &["--prompt", "another", "--max-tokens", "1"])));
    assert!(line.contains("another process that uses this session"), "{line}");
    // SAFETY: the child runs.
    unsafe { libc::kill(child.id() as i32, libc::SIGINT) };
    let mut rest = vec![];
    child.stdout.as_mut().unwrap().read_to_end(&mut rest).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    let left: Vec<_> = dir
        .path()
        .read_dir()
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    assert_eq!(left, std::slice::from_ref(&file), "the session and nothing else");
    let raw = with(&args, &["--json", "--max-tokens", "8"]);
    let after = json(&run(raw));
    let restored = after["stats"]["session_tokens_restored"].as_u64().unwrap();
    // The same tokens as without the interruption.
    let model = endless.path().to_str().unwrap();
    let straight = ["--model", model, "--raw", "--json", "--prompt", "hello"];
    let whole = json(&run(with(&straight, &["--max-tokens", &(restored + 9).to_string()])));
    let prompt = whole["prompt_ids"].as_array().unwrap().len() as u64;
    let from = (restored - prompt + 1) as usize;
    assert_eq!(ids(&after), ids(&whole)[from..from + 8]);
}

#[test]
fn the_prefix_store_spares_what_came_before() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    let common = ["--json", "--raw", "--prompt", TEXT];
    let kept = ["--prefix-store", store.to_str().unwrap()];
    let plain = json(&run(with(&common, &["--max-tokens", "12"])));
    let first = json(&run(with(&common, &["--max-tokens", "1", kept[0], kept[1]])));
    assert_eq!(first["stats"]["prefix_tokens_restored"], 0);
    // The prompt's own state leaves nothing to feed, so the text goes on a little.
    let longer = format!("{TEXT} he");
    let longer = ["--json", "--raw", "--prompt", &longer, "--max-tokens", "12"];
    let want = json(&run(with(&longer, &[])));
    let second = run(with(&longer, &["--stats", kept[0], kept[1]]));
    assert!(stderr(&second).contains("prefix store"), "{}", stderr(&second));
    let second = json(&second);
    let prompt = plain["prompt_ids"].as_array().unwrap().len();
    assert_eq!(second["stats"]["prefix_tokens_restored"], prompt);
    assert_eq!(ids(&second), ids(&want));
    let off = run(with(&common, &["--max-tokens", "1", "--prefix-store", "off"]));
    assert_eq!(json(&off)["stats"]["prefix_tokens_restored"], 0);
    assert!(!Path::new("off").exists());
}
