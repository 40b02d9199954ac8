//! `anabranch jobs`: errors stay with their lines, and results of something else are left alone.
#![cfg(unix)]

mod common;

use std::collections::BTreeSet;
use std::fs;

use common::jobs::{Place, line, questions, user};
use serde_json::{Value, json};

#[test]
fn a_bad_line_has_its_own_error() {
    let hello = user("Hello");
    let with = |name: &str, value: Value| {
        let mut body = json!({"messages": hello, "max_tokens": 2});
        body[name] = value;
        body
    };
    let mut lines = vec![line("good", with("max_tokens", json!(2)))];
    let mut want = vec![];
    for (id, body, code, words) in [
        (
            "field",
            with("top_logprobs", json!(3)),
            "unknown_field",
            "body.top_logprobs",
        ),
        (
            "long",
            with("max_tokens", json!(1_000_000)),
            "context_length_exceeded",
            "make 10000",
        ),
        (
            "n",
            with("n", json!(2)),
            "unsupported_value",
            "body.n: found 2, expected 1",
        ),
        (
            "stream",
            with("stream", json!(true)),
            "unsupported_value",
            "body.stream: found true",
        ),
        (
            "hot",
            with("temperature", json!(-1)),
            "invalid_value",
            "found -1, expected a number from 0",
        ),
        (
            "text",
            with("temperature", json!("hot")),
            "invalid_type",
            "body.temperature: found \"hot\"",
        ),
        (
            "none",
            with("max_tokens", json!(0)),
            "invalid_value",
            "found 0, expected a whole number from 1",
        ),
        (
            "two",
            with("max_completion_tokens", json!(3)),
            "invalid_value",
            "found 2, expected the same as",
        ),
        (
            "effort",
            with("reasoning_effort", json!("medium")),
            "unsupported_value",
            "off, none, low, high, max",
        ),
        (
            "empty",
            json!({"messages": []}),
            "invalid_value",
            "at least one message",
        ),
        (
            "missing",
            json!({"max_tokens": 2}),
            "missing_field",
            "body.messages: found nothing",
        ),
        (
            "role",
            with("messages", json!([{"role": "tool", "content": "x"}])),
            "unsupported_value",
            "messages[0].role",
        ),
        (
            "image",
            with(
                "messages",
                json!([{"role": "user", "content": [{"type": "image_url"}]}]),
            ),
            "unsupported_value",
            "body.messages[0].content[0].type",
        ),
        ("stop", with("stop", json!([""])), "invalid_value", "an empty text"),
        (
            "ids",
            json!({"prompt": [9_999_999]}),
            "invalid_value",
            "found 9999999, expected ids from 0 to",
        ),
        ("blank", json!({"prompt": ""}), "invalid_value", "at least one token"),
    ] {
        lines.push(line(id, body));
        want.push((id, code, words));
    }
    let post = |method: &str, url: &str, id: &str| {
        json!({"custom_id": id, "method": method, "url": url, "body": with("max_tokens", json!(2))}).to_string()
    };
    lines.push(post("GET", "/v1/chat/completions", "get"));
    lines.push(post("POST", "/v1/embeddings", "url"));
    lines.push(
        json!({"custom_id": "extra", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}, "x": 1})
            .to_string(),
    );
    want.extend([
        ("get", "invalid_method", "found \"GET\", expected \"POST\""),
        ("url", "invalid_url", "/v1/chat/completions"),
        ("extra", "unknown_field", "x: this field is not known"),
    ]);
    // Without a name of their own: no JSON, twice, JSON that is no object, a line that is too long, no UTF-8.
    let anonymous = [
        "{",
        "{",
        "[1]",
        "\"custom_id\"",
        "{\"method\": \"POST\"}",
        &"x".repeat(17 << 20),
    ];
    lines.extend(anonymous.map(str::to_owned));
    lines.push(lines[0].clone());
    lines.push(line("good", json!({"prompt": "another", "max_tokens": 2})));
    lines.push(String::new());
    lines.push(line("last", with("max_tokens", json!(3))));
    let place = Place::new(&lines);
    let (status, text) = place.run("out.jsonl", &[]);
    assert_eq!(status, 3, "{text}");
    let results: Vec<Value> = place
        .text("out.jsonl")
        .lines()
        .map(|l| serde_json::from_str(l).unwrap())
        .collect();
    assert_eq!(results.len(), lines.len() - 1, "one for each line that is not blank");
    let ids: BTreeSet<&str> = results.iter().map(|r| r["id"].as_str().unwrap()).collect();
    assert_eq!(ids.len(), results.len());
    for (id, code, words) in want {
        let found: Vec<&Value> = results.iter().filter(|r| r["custom_id"] == *id).collect();
        let [result] = found[..] else { panic!("{id}: {found:?}") };
        assert!(result["response"].is_null(), "{result}");
        assert_eq!(result["error"]["code"], code, "{result}");
        assert!(
            result["error"]["message"].as_str().unwrap().contains(words),
            "{words:?}: {result}"
        );
    }
    let codes = |id: Value| {
        let of_id = results.iter().filter(|r| r["custom_id"] == id && !r["error"].is_null());
        let mut codes: Vec<&str> = of_id.map(|r| r["error"]["code"].as_str().unwrap()).collect();
        codes.sort_unstable();
        codes
    };
    assert_eq!(codes("good".into()), ["duplicate_custom_id"; 2]);
    assert_eq!(
        codes(Value::Null),
        [
            "invalid_json",
            "invalid_json",
            "invalid_type",
            "invalid_type",
            "line_too_long",
            "missing_field"
        ]
    );
    let answered = results.iter().filter(|r| r["error"].is_null());
    let answered: BTreeSet<&str> = answered.map(|r| r["custom_id"].as_str().unwrap()).collect();
    assert_eq!(answered, BTreeSet::from(["good", "last"]));
    // Nothing is done twice, and the status stays.
    let before = place.text("out.jsonl");
    assert_eq!(place.run("out.jsonl", &[]).0, 3);
    assert_eq!(place.text("out.jsonl"), before);
}

#[test]
fn results_of_something_else_are_left_alone() {
    let lines = questions(3);
    let place = Place::new(&lines);
    assert_eq!(place.run("out.jsonl", &[]).0, 0);
    let kept = place.text("out.jsonl");
    let refused = |out: &str, more: &[&str], parts: &[&str]| {
        let before = fs::read(place.path(out)).unwrap();
        let (status, text) = place.run(out, more);
        assert_eq!(status, 1, "{text}");
        let error = text.lines().find(|line| line.starts_with("error: ")).unwrap();
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        assert_eq!(fs::read(place.path(out)).unwrap(), before);
    };
    let others = &["found 3 results of other lines, another model or other settings"];
    refused("out.jsonl", &["--thinking-effort", "low"], others);
    refused("out.jsonl", &["--max-tokens", "99"], others);
    refused(
        "in.jsonl",
        &[],
        &["in.jsonl: found the input itself, expected another file"],
    );
    fs::write(place.path("questions.jsonl"), place.text("in.jsonl")).unwrap();
    refused(
        "questions.jsonl",
        &[],
        &["questions.jsonl: line 1: found", "expected results of anabranch jobs"],
    );
    // What never ends, or is no file, is refused before it is read.
    for out in ["/dev/full", "/dev/null", "."] {
        let (status, text) = place.run(out, &[]);
        assert_eq!(status, 1, "{text}");
        assert!(text.contains("expected a file; name a file"), "{text}");
    }
    fs::write(place.path("notes.txt"), "a thought without an end").unwrap();
    refused("notes.txt", &[], &["line 1: found another text"]);
    fs::write(
        place.path("twice.jsonl"),
        kept.lines().next().unwrap().to_owned() + "\n" + &kept,
    )
    .unwrap();
    refused("twice.jsonl", &[], &["for the second time"]);
    // An input that grew goes on; one that lost a line that is done does not.
    fs::write(place.path("in.jsonl"), questions(4).join("\n")).unwrap();
    let (status, text) = place.run("out.jsonl", &[]);
    assert_eq!(status, 0, "{text}");
    assert!(place.text("out.jsonl").starts_with(&kept));
    fs::write(place.path("in.jsonl"), lines[1..].join("\n")).unwrap();
    refused("out.jsonl", &[], &["found 2 results of other lines"]);
}
