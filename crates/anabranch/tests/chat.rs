//! The chat at a terminal, which script(1) provides.
#![cfg(target_os = "linux")]

mod common;

use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use common::Golden;

/// A chat on a pseudo-terminal; `None` where there is no script(1).
fn start(model: &Path, max_tokens: &str) -> Option<Child> {
    let program = env!("CARGO_BIN_EXE_anabranch");
    let line = format!(
        "'{program}' run --model '{}' --max-tokens {max_tokens} --stats",
        model.display()
    );
    let child = Command::new("script")
        .args(["-qefc", &line, "/dev/null"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn();
    match child {
        Ok(child) => Some(child),
        Err(error) => {
            println!("skipped: script(1) cannot be run: {error}");
            None
        }
    }
}

/// Reads until `mark` has come.
fn read_until(child: &mut Child, mark: &str) -> String {
    let mut seen = vec![];
    let pipe = child.stdout.as_mut().unwrap();
    while !String::from_utf8_lossy(&seen).contains(mark) {
        let mut byte = [0];
        pipe.read_exact(&mut byte)
            .unwrap_or_else(|e| panic!("{e} before {mark:?}: {}", String::from_utf8_lossy(&seen)));
        seen.push(byte[0]);
    }
    String::from_utf8_lossy(&seen).into_owned()
}

fn type_in(child: &mut Child, text: &str) {
    let pipe = child.stdin.as_mut().unwrap();
    pipe.write_all(text.as_bytes()).and_then(|()| pipe.flush()).unwrap();
}

#[test]
fn lines_are_answered_until_quit() {
    let Some(mut child) = start(&Golden::read("k3_a").dir, "6") else {
        return;
    };
    read_until(&mut child, "> ");
    for _ in 0..2 {
        type_in(&mut child, "hello\n");
        let answer = read_until(&mut child, "\n> ");
        assert!(answer.contains("generated"), "{answer}");
    }
    type_in(&mut child, "/quit\n");
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn ctrl_d_ends_the_chat() {
    let Some(mut child) = start(&Golden::read("k3_a").dir, "6") else {
        return;
    };
    read_until(&mut child, "> ");
    type_in(&mut child, "\x04");
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn ctrl_c_stops_the_answer_and_then_the_chat() {
    let endless = common::endless();
    let Some(mut child) = start(endless.path(), "8000") else {
        return;
    };
    read_until(&mut child, "> ");
    type_in(&mut child, "hello\n");
    // The terminal's echo of the line, then some of the answer.
    read_until(&mut child, "hello\r\n");
    std::thread::sleep(std::time::Duration::from_millis(300));
    type_in(&mut child, "\x03");
    read_until(&mut child, "(stopped)");
    read_until(&mut child, "\n> ");
    type_in(&mut child, "\x03");
    assert_eq!(child.wait().unwrap().code(), Some(130));
}
