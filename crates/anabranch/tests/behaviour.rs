//! Exit statuses, signals, pipes, help: what a shell sees.

mod common;

use common::{Golden, anabranch, run, stderr, stdout};

#[test]
fn wrong_usage_says_found_and_expected_with_status_2() {
    for (args, parts) in [
        (
            &["run", "--prompt", "x", "--temperature", "-1"][..],
            &["found -1", "expected a number from 0"][..],
        ),
        (
            &["run", "--prompt", "x", "--temperature", "nan"],
            &["found nan", "expected"],
        ),
        (
            &["run", "--prompt", "x", "--temperature", "1", "--top-p", "0"],
            &["found 0", "expected a number above 0"],
        ),
        (
            &["run", "--prompt", "x", "--temperature", "1", "--min-p", "1.5"],
            &["found 1.5", "expected a number from 0 to 1"],
        ),
        (
            &["run", "--prompt", "x", "--temperature", "1", "--top-k", "-3"],
            &["-3", "--top-k"],
        ),
        (&["run", "--prompt", "x", "--top-k", "3"], &["--temperature"]),
        (
            &["run", "--prompt", "x", "--max-tokens", "0"],
            &["found 0", "expected a whole number from 1"],
        ),
        (
            &["run", "--prompt", "x", "--memory", "12XB"],
            &["found \"12XB\"", "expected a size such as"],
        ),
        (&["run", "--prompt", "x", "--threads", "0"], &["0", "1..=1024"]),
        (
            &["run", "--prompt", "x", "--isa", "neon"],
            &["found neon", "expected", "plain"],
        ),
        (&["run", "--prompt", "x", "--stop", ""], &["found no text", "expected"]),
        (&["run", "--ids", "1,x"], &["found \"x\"", "expected whole numbers"]),
        (&["run", "--ids", "1", "--prompt", "x"], &["--prompt", "--ids"]),
        (&["run", "--ids", "1", "--system", "x"], &["--system", "--ids"]),
        (
            &["run", "--prompt", "x", "--raw", "--thinking-effort", "low"],
            &["--thinking-effort", "--raw"],
        ),
        (
            &["run", "--prompt", "x", "--thinking-effort", "medium"],
            &["medium", "off, low, high, max"],
        ),
        (
            &["run"],
            &["found no prompt", "expected --prompt or --ids", "--prompt -"],
        ),
        (&["logits", "--ids", "1"], &["--out"]),
        (&["synth", "--config", "c.json", "--out", "x"], &["--seed"]),
        (&["fly"], &["fly"]),
        (&[], &["Usage"]),
    ] {
        let output = run(args);
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {text}");
        assert!(output.stdout.is_empty());
        for part in parts {
            assert!(text.contains(part), "{part:?} is missing for {args:?}: {text}");
        }
    }
}

#[test]
fn help_defines_its_words() {
    let help = run(["run", "--help"]);
    assert!(help.status.success());
    let text = stdout(&help);
    let flat = text.split_whitespace().collect::<Vec<_>>().join(" ");
    for part in [
        "needed expert_bytes_needed: the sum over all passes of the union of the routes",
        "times the bytes of an expert",
        "read expert_bytes_read: expert bytes asked for",
        "device device_bytes: read, widened to whole pages",
        "publisher's default is max",
        "GB = 10^9 bytes; GiB and G = 2^30",
        "130 interrupted",
        "The text goes to standard output, everything else to standard error.",
        "--isa",
        "--mla-eps",
    ] {
        assert!(flat.contains(part), "{part:?} is missing in:\n{text}");
    }
    let short = stdout(&run(["run", "-h"]));
    assert!(short.lines().count() < 45 && !short.contains("--isa"), "{short}");
    let version = stdout(&run(["--version"]));
    let expected = format!(
        "anabranch {} (numerics {})\n",
        env!("CARGO_PKG_VERSION"),
        engine::NUMERICS_VERSION
    );
    assert_eq!(version, expected);
}

#[test]
fn verbose_shows_the_memory_and_the_kernels() {
    let golden = Golden::read("k3_a");
    let output = run([
        "run",
        "--model",
        golden.model(),
        "--ids",
        "1",
        "--max-tokens",
        "1",
        "--verbose",
        "--isa",
        "plain",
    ]);
    let text = stderr(&output);
    for part in ["trunk", "state", "pass", "slots", "in all", "kernels: plain, "] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

/// The first command of the README.
#[test]
fn without_a_model_the_demo_answers() {
    let question = ["run", "--prompt", "What is the capital of France?"];
    let output = run(question);
    assert!(
        stderr(&output).contains("this is the demo model"),
        "{}",
        stderr(&output)
    );
    assert_eq!(stdout(&output), "The capital of France is Paris.\n");
    let answer = common::json(&run(question.into_iter().chain(["--json"])));
    let ids = [
        314, 303, 265, 2228, 279, 3058, 46, 4100, 1593, 4101, 4100, 1041, 4101, 4098,
    ];
    assert_eq!(common::numbers(&answer["ids"]), ids);
    assert_eq!(answer["text"], "The capital of France is Paris.");
    assert_eq!(answer["finish_reason"], "stop");
    assert!(stdout(&run(["inspect"])).contains("nothing is missing"));
}

/// Thoughts are not part of the text.
#[test]
fn reasoning_goes_to_standard_error() {
    let question = ["run", "--prompt", "What is 12 + 30?", "--thinking-effort", "low"];
    let answer = common::json(&run(question.into_iter().chain(["--json"])));
    assert_eq!(answer["text"], "12 + 30 = 42.");
    assert_eq!(answer["reasoning"], "2 + 0 = 2, 10 + 30 = 40, 40 + 2 = 42");
    let output = run(question);
    assert_eq!(stdout(&output), "12 + 30 = 42.\n");
    assert!(stderr(&output).contains("40 + 2 = 42\n"), "{}", stderr(&output));
}

/// Whoever reads closes the pipe after a few bytes, as `head` does.
#[test]
fn a_closed_standard_output_ends_quietly() {
    use std::io::Read;
    use std::process::Stdio;
    let golden = Golden::read("k3_a");
    let ids = golden.ids();
    let endless = common::endless();
    let endless = endless.path().to_str().unwrap();
    for args in [
        &["run", "--model", endless, "--ids", &ids, "--max-tokens", "100000"][..],
        &["inspect", golden.model()],
    ] {
        let mut child = anabranch(args)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut pipe = child.stdout.take().unwrap();
        if args[0] == "run" {
            pipe.read_exact(&mut [0; 4]).unwrap();
        }
        drop(pipe);
        let output = child.wait_with_output().unwrap();
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(0), "{args:?}: {text}");
        assert!(text.lines().all(|line| line.starts_with("note: ")), "{args:?}: {text}");
    }
}

#[cfg(unix)]
mod signals {
    use super::common::{Golden, anabranch, numbers};
    use std::io::{BufRead, BufReader};
    use std::process::{Child, Command, Stdio};
    use std::time::Duration;

    fn send(signal: &str, child: &Child) {
        let sent = Command::new("kill")
            .args([signal, &child.id().to_string()])
            .status()
            .unwrap();
        assert!(sent.success());
    }

    fn interrupted_answer(signal: &str) {
        let golden = Golden::read("k3_a");
        let ids = golden.ids();
        let endless = super::common::endless();
        let mut child = anabranch([
            "run",
            "--model",
            endless.path().to_str().unwrap(),
            "--ids",
            &ids,
            "--max-tokens",
            "100000",
            "--json",
            "--verbose",
        ])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
        // Loaded when it says which kernels run.
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap().starts_with("kernels: ")));
        std::thread::sleep(Duration::from_millis(700));
        send(signal, &child);
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(130));
        let answer: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(answer["finish_reason"], "cancelled");
        let ids = numbers(&answer["ids"]);
        assert!(!ids.is_empty() && ids.len() < 100_000, "{}", ids.len());
        assert!(ids.starts_with(&golden.generated[..golden.generated.len().min(ids.len())]));
        assert_eq!(answer["stats"]["generated_tokens"], ids.len());
        let rest: Vec<String> = lines.map(Result::unwrap).collect();
        let expected = |line: &String| line.starts_with("note: ") || line.starts_with("experts");
        assert!(rest.iter().all(expected), "{rest:?}");
    }

    #[test]
    fn ctrl_c_shows_what_there_is() {
        interrupted_answer("-INT");
    }

    #[test]
    fn sigterm_is_like_ctrl_c() {
        interrupted_answer("-TERM");
    }

    #[test]
    fn an_interrupted_synth_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let mut config: serde_json::Value = serde_json::from_str(super::common::TINY).unwrap();
        config["text_config"]["num_experts"] = 128.into();
        config["text_config"]["routed_expert_hidden_size"] = 256.into();
        config["text_config"]["moe_intermediate_size"] = 256.into();
        let path = dir.path().join("config.json");
        std::fs::write(&path, config.to_string()).unwrap();
        // A busy machine may let the program end before the signal reaches it: then once more.
        let interrupted = (0..20).any(|attempt| {
            let out = dir.path().join(format!("out{attempt}"));
            let (config, target) = (path.to_str().unwrap(), out.to_str().unwrap());
            let mut child = anabranch(["synth", "--config", config, "--seed", "1", "--out", target])
                .stderr(Stdio::piped())
                .spawn()
                .unwrap();
            let started = || std::fs::read_dir(&out).is_ok_and(|mut entries| entries.next().is_some());
            while !started() && child.try_wait().unwrap().is_none() {
                std::thread::sleep(Duration::from_millis(1));
            }
            send("-INT", &child);
            let output = child.wait_with_output().unwrap();
            if output.status.success() {
                std::fs::remove_dir_all(&out).unwrap();
                return false;
            }
            assert_eq!(output.status.code(), Some(130), "{}", super::stderr(&output));
            assert_eq!(std::fs::read_dir(&out).unwrap().count(), 0);
            true
        });
        assert!(interrupted, "synth always ended before the signal");
    }
}
