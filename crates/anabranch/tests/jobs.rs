//! `anabranch jobs`: results as alone, whatever happens to the run.
#![cfg(unix)]

mod common;

use std::collections::BTreeSet;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::jobs::{Place, line, questions, user};
use common::{stderr, stdout};
use serde_json::{Value, json};

/// The numbers that a test may vary: `JOBS_LINES` and `JOBS_KILLS` make it the full form, see the Makefile.
fn number(name: &str, usual: usize) -> usize {
    std::env::var(name).ok().map_or(usual, |text| text.parse().unwrap())
}

/// splitmix64.
fn random(seed: &mut u64) -> u64 {
    *seed = seed.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (*seed ^ (*seed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[test]
fn killed_anywhere_and_run_again_it_gives_what_an_undisturbed_run_gives() {
    let (lines, kills) = (number("JOBS_LINES", 60), number("JOBS_KILLS", 6));
    let place = Place::new(&questions(lines));
    let start = Instant::now();
    let (status, text) = place.run("undisturbed.jsonl", &["--batch", "16"]);
    let whole = start.elapsed();
    assert_eq!(status, 0, "{text}");
    let want = place.sorted("undisturbed.jsonl");
    assert_eq!(want.len(), lines);
    println!("undisturbed in {:.1} s: {text}", whole.as_secs_f64());

    let (mut seed, mut before, mut killed) = (4, 0, 0);
    for kill in 0..kills {
        let mut child = place
            .command("out.jsonl", &["--batch", "16"])
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        // Anywhere from the first moment on, some of the work done.
        std::thread::sleep(whole.mul_f64((random(&mut seed) % 1000) as f64 / 1000.0 * 2.0 / kills as f64));
        killed += u32::from(child.try_wait().unwrap().is_none());
        child.kill().unwrap();
        child.wait().unwrap();
        let there = fs::read_to_string(place.path("out.jsonl")).unwrap_or_default();
        let done: BTreeSet<&str> = there
            .split_inclusive('\n')
            .filter(|line| line.ends_with('\n'))
            .collect();
        assert!(done.len() >= before, "results were lost");
        assert!(
            done.iter()
                .all(|line| want.binary_search(&line.trim_end().to_owned()).is_ok())
        );
        before = done.len();
        // What a kill in the middle of a write would leave: part of a line that is still missing.
        let next = want.iter().find(|line| !there.contains(line.as_str()));
        if let Some(next) = next.filter(|_| kill % 2 == 0 && there.ends_with('\n')) {
            let cut = 1 + random(&mut seed) as usize % (next.len() - 1);
            let mut out = OpenOptions::new().append(true).open(place.path("out.jsonl")).unwrap();
            out.write_all(&next.as_bytes()[..cut]).unwrap();
        }
    }
    println!("{killed} of {kills} kills hit a running process, {before} lines were done then");
    assert!(killed > 0);
    let (status, text) = place.run("out.jsonl", &["--batch", "16"]);
    assert_eq!(status, 0, "{text}");
    assert_eq!(place.sorted("out.jsonl"), want);
    // And nothing is left to do.
    let file = place.text("out.jsonl");
    let (status, text) = place.run("out.jsonl", &["--batch", "16"]);
    assert_eq!(status, 0, "{text}");
    assert!(
        text.replace(',', "")
            .contains(&format!("lines are done {lines} of them in earlier runs")),
        "{text}"
    );
    assert_eq!(place.text("out.jsonl"), file);
}

/// Results do not depend on how many run together, nor on how memory cuts prompts, and are those of `run`.
#[test]
fn each_answer_is_the_one_that_run_gives() {
    let place = Place::new(&[
        line(
            "a",
            json!({"messages": user("What is the capital of France?"), "model": "other"}),
        ),
        line(
            "b",
            json!({"messages": user("What is 12 + 30?"), "reasoning_effort": "low", "max_tokens": 100}),
        ),
        line(
            "c",
            json!({"prompt": "The captain", "max_tokens": 9, "temperature": 0.7, "seed": 5, "stop": ["the "]}),
        ),
        line(
            "d",
            json!({"prompt": [84, 104, 101], "max_tokens": 4, "n": 1, "stream": false, "user": "me"}),
        ),
    ]);
    for (out, more) in [
        ("all.jsonl", &[][..]),
        ("one.jsonl", &["--batch", "1", "--threads", "1"]),
    ] {
        let (status, text) = place.run(out, more);
        assert_eq!(status, 0, "{text}");
        assert!(
            text.contains("note: lines that ask for another model: 1, the first for \"other\""),
            "{text}"
        );
    }
    assert_eq!(place.sorted("all.jsonl"), place.sorted("one.jsonl"));
    let results = place.results("all.jsonl");
    let choice = |id: &str| {
        let result = &results[id];
        assert!(
            result["error"].is_null() && result["response"]["status_code"] == 200,
            "{result}"
        );
        result["response"]["body"]["choices"][0].clone()
    };
    for (id, args) in [
        ("a", &["--prompt", "What is the capital of France?"][..]),
        ("b", &["--prompt", "What is 12 + 30?", "--thinking-effort", "low"]),
        (
            "c",
            &[
                "--raw",
                "--prompt",
                "The captain",
                "--max-tokens",
                "9",
                "--temperature",
                "0.7",
                "--seed",
                "5",
                "--stop",
                "the ",
            ],
        ),
        ("d", &["--ids", "84,104,101", "--max-tokens", "4"]),
    ] {
        let alone = common::json(&common::run(["run", "--json"].iter().chain(args)));
        let (choice, body) = (choice(id), &results[id]["response"]["body"]);
        let text = match id {
            "a" | "b" => &choice["message"]["content"],
            _ => &choice["text"],
        };
        assert_eq!(*text, alone["text"], "{id}");
        assert_eq!(choice["finish_reason"], alone["finish_reason"], "{id}");
        assert_eq!(body["usage"]["prompt_tokens"], alone["stats"]["prompt_tokens"], "{id}");
        assert_eq!(
            body["usage"]["completion_tokens"], alone["stats"]["generated_tokens"],
            "{id}"
        );
        assert_eq!(body["created"], 0);
        assert!(body["model"].as_str().unwrap().starts_with("demo-"), "{body}");
        if id == "b" {
            assert_eq!(choice["message"]["reasoning_content"], alone["reasoning"]);
        }
    }
    let keys = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    assert_eq!(keys(&results["a"]), ["custom_id", "error", "id", "response"]);
    assert_eq!(keys(&results["a"]["response"]), ["body", "request_id", "status_code"]);
    assert_eq!(results["a"]["response"]["body"]["object"], "chat.completion");
    assert_eq!(results["c"]["response"]["body"]["object"], "text_completion");
}

#[test]
fn one_process_writes_at_a_time() {
    let place = Place::new(&questions(2));
    let held = OpenOptions::new()
        .append(true)
        .create(true)
        .open(place.path("out.jsonl"))
        .unwrap();
    held.try_lock().unwrap();
    let (status, text) = place.run("out.jsonl", &[]);
    assert_eq!(status, 1);
    assert!(
        text.contains("found another process that writes these results"),
        "{text}"
    );
    drop(held);
    assert_eq!(place.run("out.jsonl", &[]).0, 0);
}

#[test]
fn ctrl_c_keeps_what_is_finished() {
    let lines: Vec<String> = (0..200)
        .map(|n| {
            line(
                &format!("q{n}"),
                json!({"prompt": format!("Once {n}"), "max_tokens": 2 + n}),
            )
        })
        .collect();
    let place = Place::new(&lines);
    let out = place.path("out.jsonl");
    let child = place
        .command("out.jsonl", &["--batch", "4"])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let done = |path: &Path| fs::read_to_string(path).unwrap_or_default().lines().count();
    let start = Instant::now();
    while done(&out) < 3 && start.elapsed() < Duration::from_secs(120) {
        std::thread::sleep(Duration::from_millis(5));
    }
    let sent = Command::new("kill")
        .args(["-INT", &child.id().to_string()])
        .status()
        .unwrap();
    assert!(sent.success());
    let output = child.wait_with_output().unwrap();
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(130), "{text}");
    let finished = place.results("out.jsonl").len();
    assert!((3..200).contains(&finished), "{finished}");
    assert!(text.contains(&format!("{finished} of 200 lines are done")), "{text}");
    assert!(
        text.contains("the same command goes on with the lines that are left"),
        "{text}"
    );
}

/// Memory decides how many run, and lines that it cannot hold have an error.
#[test]
fn batches_are_sized_to_memory() {
    let mut lines = questions(40);
    let place = Place::new(&lines);
    let summary = |more: &[&str]| {
        let _ = fs::remove_file(place.path("out.jsonl"));
        let output = place
            .command("out.jsonl", &[more, &["--json", "--cache", "0"]].concat())
            .output()
            .unwrap();
        let text = stdout(&output);
        let summary: Value = serde_json::from_str(&text).unwrap_or_else(|_| panic!("{text} {}", stderr(&output)));
        (output.status.code().unwrap(), summary)
    };
    let (status, all) = summary(&[]);
    assert_eq!((status, &all["sequences"]), (0, &json!(40)));
    let (_, two) = summary(&["--batch", "2"]);
    assert_eq!(two["sequences"], 2);
    assert_eq!(all["generated_tokens"], two["generated_tokens"]);
    assert!(all["bytes_per_token"].as_u64() < two["bytes_per_token"].as_u64());
    assert_eq!(all["expert_bytes_read"], all["expert_bytes_needed"]);
    assert_eq!(
        (&all["lines"], &all["done"], &all["errors"]),
        (&json!(40), &json!(40), &json!(0))
    );
    for name in [
        "load_s",
        "time_s",
        "tokens_per_s",
        "passes",
        "rows",
        "pass_rows",
        "device_bytes",
        "peak_memory_bytes",
    ] {
        assert!(all[name].is_number(), "{name}: {all}");
    }
    lines.push(line("long", json!({"prompt": "x", "max_tokens": 400})));
    fs::write(place.path("in.jsonl"), lines.join("\n")).unwrap();
    let (status, summary) = summary(&["--context", "300"]);
    assert_eq!((status, &summary["errors"]), (3, &json!(1)));
    let error = &place.results("out.jsonl")["long"]["error"];
    assert!(
        error["message"]
            .as_str()
            .unwrap()
            .contains("expected at most 300 (--context)"),
        "{error}"
    );
}
