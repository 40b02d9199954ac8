//! Files of questions, and what `jobs` makes of them.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use serde_json::{Value, json};

use super::{anabranch, stderr};

/// A folder with an input; results go beside it.
pub struct Place {
    dir: tempfile::TempDir,
}

impl Place {
    pub fn new(lines: &[String]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("in.jsonl"), lines.join("\n")).unwrap();
        Self { dir }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn command(&self, out: &str, more: &[&str]) -> Command {
        let mut command = anabranch(["jobs"]);
        command
            .arg(self.path("in.jsonl"))
            .arg(self.path(out))
            .args(["--memory", "1GiB"])
            .args(more);
        command
    }

    /// Runs to the end; the status and what standard error says.
    pub fn run(&self, out: &str, more: &[&str]) -> (i32, String) {
        let output = self.command(out, more).output().unwrap();
        (output.status.code().unwrap(), stderr(&output))
    }

    pub fn text(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap()
    }

    pub fn sorted(&self, name: &str) -> Vec<String> {
        let text = self.text(name);
        assert!(text.is_empty() || text.ends_with('\n'));
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        lines.sort();
        lines
    }

    /// Results by the id of their request.
    pub fn results(&self, name: &str) -> BTreeMap<String, Value> {
        let lines = self.text(name);
        let results = lines.lines().map(|line| {
            let value: Value = serde_json::from_str(line).unwrap();
            (value["custom_id"].as_str().unwrap().to_owned(), value)
        });
        let count = lines.lines().count();
        let results: BTreeMap<_, _> = results.collect();
        assert_eq!(results.len(), count, "an id came twice");
        results
    }
}

pub fn line(custom_id: &str, body: Value) -> String {
    let url = match body.get("prompt") {
        Some(_) => "/v1/completions",
        None => "/v1/chat/completions",
    };
    json!({"custom_id": custom_id, "method": "POST", "url": url, "body": body}).to_string()
}

pub fn user(text: &str) -> Value {
    json!([{"role": "user", "content": text}])
}

/// Short questions of all kinds.
pub fn questions(count: usize) -> Vec<String> {
    let places = ["France", "Japan", "Italy", "Peru", "Kenya", "Norway"];
    (0..count)
        .map(|n| {
            let body = match n % 4 {
                0 => json!({"messages": user(&format!("What is the capital of {}?", places[n / 4 % 6])), "max_tokens": 16}),
                1 => json!({"messages": user(&format!("What is {n} + 17?")), "max_tokens": 12, "temperature": 0.9}),
                2 => json!({"prompt": "The captain looked out", "max_tokens": 3 + n % 9, "temperature": 1, "seed": n}),
                _ => json!({"messages": user(&format!("What is {n} + 30?")), "max_tokens": 20, "reasoning_effort": "low"}),
            };
            line(&format!("q{n}"), body)
        })
        .collect()
}
