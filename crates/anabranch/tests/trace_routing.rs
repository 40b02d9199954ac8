//! `anabranch trace routing` from outside, and the page that it made.

mod common;

use common::{Golden, error_line, json, numbers, run, stderr, stdout};
use std::path::{Path, PathBuf};

fn demo(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../demo").join(name)
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Routing of the held-out documents, with further flags.
fn held_out(more: &[&str]) -> String {
    let (model, file) = (demo("model"), demo("heldout.json"));
    let mut args = vec!["trace", "routing", "--model", text(&model), "--ids-file", text(&file)];
    args.extend(more);
    let output = run(args);
    assert!(output.status.success(), "{}", stderr(&output));
    stdout(&output)
}

#[test]
fn the_page_of_the_demo_model_is_what_the_command_says() {
    let page = std::fs::read_to_string(demo("ROUTING.md")).unwrap();
    assert!(page.contains("trace routing --ids-file demo/heldout.json\n"));
    let tables = held_out(&[]);
    assert!(page.contains(&tables), "demo/ROUTING.md lacks:\n{tables}");
    assert_eq!(held_out(&["--threads", "1"]), tables);
}

#[test]
fn json_has_the_numbers_of_the_tables() {
    let tables = held_out(&[]);
    let found: serde_json::Value = serde_json::from_str(&held_out(&["--json"])).unwrap();
    assert_eq!(
        (found["texts"].as_u64(), found["tokens"].as_u64()),
        (Some(8), Some(576))
    );
    let layers = found["layers"].as_array().unwrap();
    assert_eq!(layers.len(), 12);
    let percent = |share: &serde_json::Value| format!("{:.1} %", 100.0 * share.as_f64().unwrap());
    for layer in layers.iter().chain([&found["all"], &found["by_chance"]]) {
        let cells = [
            &layer["top_tenth"],
            &layer["repeat"],
            &layer["recall"][0]["share"],
            &layer["recall"][1]["share"],
        ];
        let line = format!("| {} |\n", cells.map(percent).join(" | "));
        assert!(tables.contains(&line), "{line} is missing in\n{tables}");
        if let Some(reads) = layer.get("reads") {
            assert_eq!(numbers(reads).iter().sum::<u64>(), 4 * 576);
        }
    }
    let ngram = &found["ngram"];
    assert_eq!(
        ngram["steps"].as_u64().unwrap() + ngram["accepted"].as_u64().unwrap(),
        576 - 8
    );
    // What a trained model has and random weights have not.
    let [all, chance] = ["all", "by_chance"].map(|key| &found[key]);
    for key in ["top_tenth", "repeat"] {
        assert!(
            all[key].as_f64().unwrap() > 1.5 * chance[key].as_f64().unwrap(),
            "{key}"
        );
    }
    assert!(all["recall"][0]["share"].as_f64().unwrap() > 0.7);
    assert!(all["recall"][1]["share"].as_f64().unwrap() > 0.9);
}

/// The model goes on as it does in `run`, and all tokens that went through it are counted.
#[test]
fn questions_are_answered_and_counted_as_in_run() {
    let model = demo("model");
    let question = "What is the capital of France?";
    let answer = json(&run(["run", "--model", text(&model), "--prompt", question, "--json"]));
    let (prompt, ids) = (numbers(&answer["prompt_ids"]), numbers(&answer["ids"]));
    assert_eq!(answer["finish_reason"], "stop");
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("questions.jsonl");
    let line = serde_json::json!({"kind": "capital", "messages": [{"role": "user", "content": question}]});
    std::fs::write(&file, format!("{line}\n")).unwrap();
    let traced = |args: &[&str]| {
        let start = ["trace", "routing", "--json", "--model", text(&model)];
        json(&run(start.iter().chain(args)))
    };
    let from_file = traced(&["--questions", text(&file), "--max-tokens", "100"]);
    assert_eq!(from_file["tokens"], prompt.len() + ids.len() - 1);
    let steps = |found: &serde_json::Value| {
        found["ngram"]["steps"].as_u64().unwrap() + found["ngram"]["accepted"].as_u64().unwrap()
    };
    assert_eq!(steps(&from_file), ids.len() as u64);
    assert_eq!(traced(&["--prompt", question, "--max-tokens", "100"]), from_file);
    let cut = traced(&["--prompt", question, "--max-tokens", "3"]);
    assert_eq!(
        (cut["tokens"].as_u64(), steps(&cut)),
        (Some(prompt.len() as u64 + 2), 3)
    );
    let alone = traced(&["--prompt", question]);
    assert_eq!(
        (alone["tokens"].as_u64(), steps(&alone)),
        (Some(prompt.len() as u64), prompt.len() as u64 - 1)
    );
    let raw = traced(&["--prompt", question, "--raw"]);
    assert!(raw["tokens"].as_u64() < alone["tokens"].as_u64());
}

#[test]
fn what_cannot_be_traced_is_said_in_one_line() {
    let golden = Golden::read("k3_a");
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, content: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, content).unwrap();
        path
    };
    for (flag, path, parts) in [
        (
            "--ids-file",
            dir.path().join("none"),
            &["none: cannot read", "check that the path exists"][..],
        ),
        (
            "--ids-file",
            file("a.json", "{}"),
            &["a.json: found other JSON (missing field `ids`", "correct the file"],
        ),
        (
            "--ids-file",
            file("b.json", "{\"ids\": [1, 999999]}"),
            &["999999", "expected"],
        ),
        (
            "--questions",
            file("c.jsonl", "{\"messages\": 1}"),
            &["c.jsonl: line 1: found other JSON", "\"messages\""],
        ),
    ] {
        let error = error_line(&run(["trace", "routing", "--model", golden.model(), flag, text(&path)]));
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    }
    for (args, part) in [
        (&["trace", "routing"][..], "--ids-file"),
        (
            &["trace", "routing", "--prompt", "a", "--ids-file", "b"],
            "cannot be used with",
        ),
        (&["trace", "routing", "--ids-file", "b", "--raw"], "--raw"),
        (&["trace"], "routing"),
    ] {
        let output = run(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(stderr(&output).contains(part), "{args:?}: {}", stderr(&output));
    }
    let help = stdout(&run(["trace", "routing", "--help"]));
    let flat = help.split_whitespace().collect::<Vec<_>>().join(" ");
    for word in [
        "top_tenth: share of the layer's reads",
        "repeat share",
        "recall share",
        "N-gram drafts:",
    ] {
        assert!(flat.contains(word), "{word:?} is missing in:\n{help}");
    }
}
