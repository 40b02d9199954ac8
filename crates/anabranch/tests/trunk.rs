//! `--trunk int8` from outside: every output says that it is not weight-exact, and what was made with it stays apart.

mod common;

use std::fs;
use std::path::Path;

use common::jobs::Place;
use common::{error_line, json, run, stderr, stdout};
use serde_json::{Value, json};

const LABEL: &str = "int8, not weight-exact";
const PROMPT: &str = "What is the capital of France?";

/// A folder for trunks, and the flags that use it.
struct Int8 {
    folder: tempfile::TempDir,
}

impl Int8 {
    fn new() -> Self {
        Self {
            folder: tempfile::tempdir().unwrap(),
        }
    }

    fn path(&self) -> &str {
        self.folder.path().to_str().unwrap()
    }

    fn flags(&self) -> [&str; 4] {
        ["--trunk", "int8", "--trunk-folder", self.path()]
    }

    /// The arguments with the flags behind them.
    fn with<'a>(&'a self, args: &[&'a str]) -> Vec<&'a str> {
        [args, &self.flags()].concat()
    }
}

fn trunks(folder: &Path) -> usize {
    let names = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
    names.filter(|name| name.to_string_lossy().ends_with(".trunk")).count()
}

#[test]
fn an_answer_says_so_in_every_form() {
    let int8 = Int8::new();
    let text = run(int8.with(&["run", "--prompt", PROMPT, "--stats", "--verbose"]));
    assert!(stdout(&text).contains("Paris"), "{}", stdout(&text));
    let side = stderr(&text);
    for part in [
        "note: the trunk is converted to int8, once for this model: ",
        "the trunk was converted to int8 once",
        "note: trunk int8, not weight-exact: results are not those of the published weights",
        "resident weights (int8, not weight-exact)",
        "  trunk        int8, not weight-exact",
    ] {
        assert!(side.contains(part), "{part}:\n{side}");
    }
    assert_eq!(trunks(int8.folder.path()), 1);
    let events = int8.folder.path().join("events");
    let again = int8.with(&[
        "run",
        "--prompt",
        PROMPT,
        "--json",
        "--events",
        events.to_str().unwrap(),
    ]);
    let again = run(again);
    assert!(!stderr(&again).contains("converted"), "{}", stderr(&again));
    assert_eq!(json(&again)["trunk"], LABEL);
    for line in fs::read_to_string(&events).unwrap().lines() {
        let event: Value = serde_json::from_str(line).unwrap();
        assert_eq!(event["trunk"], LABEL);
    }
    // The published weights say nothing of the kind.
    let exact = run(["run", "--prompt", PROMPT, "--json", "--stats", "--verbose"]);
    assert_eq!(json(&exact)["trunk"], "bf16");
    assert!(!stderr(&exact).contains("not weight-exact"), "{}", stderr(&exact));
}

#[test]
fn without_a_folder_the_users_own_is_used() {
    let cache = tempfile::tempdir().unwrap();
    let mut command = common::anabranch(["run", "--prompt", PROMPT, "--trunk", "int8", "--max-tokens", "1"]);
    let output = command.env("XDG_CACHE_HOME", cache.path()).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(trunks(&cache.path().join("anabranch/trunks")), 1);
}

#[test]
fn logits_routes_and_inspect_say_so() {
    let int8 = Int8::new();
    let out = int8.folder.path().join("l.npy");
    let logits = run(int8.with(&["logits", "--ids", "3,4,5", "--out", out.to_str().unwrap()]));
    assert!(stderr(&logits).contains(LABEL), "{}", stderr(&logits));
    let table = run(int8.with(&["trace", "routing", "--prompt", PROMPT]));
    assert!(stdout(&table).contains(LABEL), "{}", stdout(&table));
    let routing = json(&run(int8.with(&["trace", "routing", "--prompt", PROMPT, "--json"])));
    assert_eq!(routing["trunk"], LABEL);
    let inspect = run(["inspect", "--trunk", "int8"]);
    let text = stdout(&inspect);
    assert!(
        text.contains("as int8, not weight-exact") && text.contains("resident weights (int8, not weight-exact)"),
        "{text}"
    );
    let trunk = |more: &[&str]| {
        let found = json(&run([&["inspect", "--json"], more].concat()));
        (
            found["memory"]["trunk"].clone(),
            found["memory"]["least"]["trunk"].as_u64().unwrap(),
        )
    };
    let (exact, converted) = (trunk(&[]), trunk(&["--trunk", "int8"]));
    assert_eq!((exact.0, converted.0), (json!("bf16"), json!(LABEL)));
    assert!(converted.1 * 10 < exact.1 * 7, "{} of {}", converted.1, exact.1);
}

#[test]
fn jobs_say_so_in_each_answer_and_keep_results_apart() {
    let int8 = Int8::new();
    let body = json!({"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 5});
    let line = json!({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}).to_string();
    let place = Place::new(&[line]);
    let (status, side) = place.run("out", &[&int8.flags()[..], &["--json"]].concat());
    assert_eq!(status, 0, "{side}");
    assert!(side.contains("trunk: int8, not weight-exact"), "{side}");
    assert_eq!(place.results("out")["a"]["response"]["body"]["trunk"], LABEL);
    let (status, side) = place.run("out", &[]);
    assert_eq!(status, 1);
    assert!(side.contains("other settings"), "{side}");
    let (status, side) = place.run("exact", &[]);
    assert!(status == 0 && !side.contains("not weight-exact"), "{side}");
    let exact = &place.results("exact")["a"]["response"]["body"];
    assert!(exact.get("trunk").is_none(), "{exact}");
}

#[test]
fn a_session_belongs_to_its_trunk() {
    let int8 = Int8::new();
    let file = int8.folder.path().join("s");
    let session = [
        "run",
        "--prompt",
        PROMPT,
        "--session",
        file.to_str().unwrap(),
        "--max-tokens",
        "5",
    ];
    let made = run(int8.with(&session));
    assert!(made.status.success(), "{}", stderr(&made));
    let line = error_line(&run(session));
    for part in [
        file.to_str().unwrap(),
        "found a trunk of int8, not weight-exact, expected bf16",
        "--trunk",
    ] {
        assert!(line.contains(part), "{line}");
    }
}

#[test]
fn a_folder_that_cannot_be_used_is_named_with_a_way_out() {
    let int8 = Int8::new();
    let file = int8.folder.path().join("file");
    fs::write(&file, "").unwrap();
    let below = file.join("below");
    let line = error_line(&run([
        "run",
        "--prompt",
        "x",
        "--trunk",
        "int8",
        "--trunk-folder",
        below.to_str().unwrap(),
    ]));
    assert!(
        line.contains(below.to_str().unwrap()) && line.contains("name a folder"),
        "{line}"
    );
}
