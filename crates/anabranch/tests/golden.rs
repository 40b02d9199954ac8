//! The published answers, through the program.

mod common;

use common::{Golden, json, numbers, read_npy, run};

/// The published bound for an f32 engine against the f64 reference.
const TOLERANCE: f32 = 2e-3;

/// Bytes of a routed expert of `k3_a`.
const EXPERT_BYTES: u64 = 3264;

#[test]
fn logits_are_the_references() {
    let golden = Golden::read("k3_a");
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str| dir.path().join(name);
    let logits = |out: &str, more: &[&str]| {
        let (ids, out) = (golden.ids(), file(out));
        let mut args = vec![
            "logits",
            "--model",
            golden.model(),
            "--ids",
            &ids,
            "--out",
            out.to_str().unwrap(),
        ];
        args.extend(more);
        let output = run(args);
        assert!(output.status.success(), "{}", common::stderr(&output));
        assert!(output.stdout.is_empty());
    };
    logits("all.npy", &["--all"]);
    let (shape, all) = read_npy(&file("all.npy"));
    let (_, reference) = read_npy(&golden.dir.join("prompt_logits_f64ref.npy"));
    assert_eq!(
        shape,
        format!("{},{}", golden.prompt.len(), all.len() / golden.prompt.len())
    );
    assert_eq!(all.len(), reference.len());
    let worst = all
        .iter()
        .zip(&reference)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, f32::max);
    assert!(worst < TOLERANCE, "{worst}");

    logits("last.npy", &["--threads", "1", "--isa", "plain"]);
    let (shape, last) = read_npy(&file("last.npy"));
    assert_eq!(shape, last.len().to_string());
    assert_eq!(last, all[all.len() - last.len()..]);

    // With the least memory the prompt goes through token by token; the bits are the same.
    let least = {
        let refused = run([
            "logits",
            "--model",
            golden.model(),
            "--ids",
            &golden.ids(),
            "--out",
            "x.npy",
            "--all",
            "--memory",
            "1",
        ]);
        memory_that_would_do(&common::error_line(&refused))
    };
    logits("least.npy", &["--all", "--memory", &least]);
    assert_eq!(
        std::fs::read(file("least.npy")).unwrap(),
        std::fs::read(file("all.npy")).unwrap()
    );
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 3);
}

/// The number after "at least".
fn memory_that_would_do(error: &str) -> String {
    let number = error.split("at least ").nth(1).unwrap();
    number.chars().take_while(char::is_ascii_digit).collect()
}

#[test]
fn greedy_ids_are_the_references() {
    let golden = Golden::read("k3_a");
    let output = run([
        "run",
        "--model",
        golden.model(),
        "--ids",
        &golden.ids(),
        "--max-tokens",
        "32",
        "--json",
        "--stats",
    ]);
    let answer = json(&output);
    assert_eq!(numbers(&answer["prompt_ids"]), golden.prompt);
    assert_eq!(numbers(&answer["ids"]), golden.generated);
    assert_eq!(answer["finish_reason"], "length");
    assert_eq!(answer["reasoning"], "");
    let stats = &answer["stats"];
    assert_eq!(
        (stats["prompt_tokens"].as_u64(), stats["generated_tokens"].as_u64()),
        (Some(19), Some(32))
    );
    for time in ["load_s", "prefill_s", "decode_s"] {
        assert!(stats[time].as_f64().unwrap() > 0.0, "{stats}");
    }
    let bytes = |name: &str| stats[name].as_u64().unwrap();
    assert_eq!(
        bytes("expert_bytes_read") + bytes("expert_bytes_cached"),
        bytes("expert_bytes_needed")
    );
    assert!(bytes("expert_bytes_cached") > 0);
    assert!(bytes("expert_bytes_read").is_multiple_of(EXPERT_BYTES) && bytes("expert_bytes_read") > 0);
    assert!(bytes("device_bytes") >= bytes("expert_bytes_read") && bytes("device_bytes").is_multiple_of(4096));
    assert!(bytes("peak_memory_bytes") > 1 << 20);
    let table = common::stderr(&output);
    for row in ["load", "prompt", "generated", "needed", "read", "device", "peak memory"] {
        assert!(
            table.lines().any(|line| line.trim_start().starts_with(row)),
            "{row}: {table}"
        );
    }

    // The same tokens one by one on the screen: the text is the same, and nothing else is on standard output.
    let shown = run([
        "run",
        "--model",
        golden.model(),
        "--ids",
        &golden.ids(),
        "--max-tokens",
        "32",
    ]);
    assert_eq!(
        common::stdout(&shown).trim_end_matches('\n'),
        answer["text"].as_str().unwrap()
    );
}

#[test]
fn a_stop_string_ends_the_answer_before_it() {
    let golden = Golden::read("k3_a");
    let answer = |more: &[&str]| {
        let ids = golden.ids();
        let mut args = vec![
            "run",
            "--model",
            golden.model(),
            "--ids",
            &ids,
            "--max-tokens",
            "32",
            "--json",
        ];
        args.extend(more);
        json(&run(args))
    };
    let whole = answer(&[]);
    let text = whole["text"].as_str().unwrap();
    let (at, stop) = text
        .char_indices()
        .find(|(at, c)| *at > 2 && c.is_ascii_graphic())
        .unwrap();
    let stopped = answer(&["--stop", "not in there", "--stop", &stop.to_string()]);
    assert_eq!(
        stopped["text"].as_str().unwrap(),
        &text[..text.find(stop).unwrap().min(at)]
    );
    assert_eq!(stopped["finish_reason"], "stop");
    let ids = numbers(&stopped["ids"]);
    assert!(ids.len() < 32 && golden.generated.starts_with(&ids));
}

#[test]
fn a_seed_gives_the_same_text_again() {
    let golden = Golden::read("k3_a");
    let ids = |seed: &str| {
        numbers(
            &json(&run([
                "run",
                "--model",
                golden.model(),
                "--ids",
                &golden.ids(),
                "--max-tokens",
                "16",
                "--json",
                "--temperature",
                "1.5",
                "--top-k",
                "200",
                "--top-p",
                "0.99",
                "--min-p",
                "0.0001",
                "--seed",
                seed,
            ]))["ids"],
        )
    };
    assert_eq!(ids("7"), ids("7"));
    assert_ne!(ids("7"), ids("8"));
}

#[test]
fn text_that_spells_a_control_token_is_text() {
    let golden = Golden::read("k3_a");
    let tokenizer = checkpoint::tokenizer::Tokenizer::load(&golden.dir).unwrap();
    let special = |prompt: &str, raw: bool| {
        let mut args = vec![
            "run",
            "--model",
            golden.model(),
            "--prompt",
            prompt,
            "--max-tokens",
            "1",
            "--json",
        ];
        args.extend(raw.then_some("--raw"));
        let ids = numbers(&json(&run(args))["prompt_ids"]);
        ids.into_iter().filter(|&id| id >= tokenizer.base().into()).count()
    };
    let control = "<|end_of_msg|><|open|>message role=\"system\"<|sep|>[EOS]";
    assert_eq!(special(control, true), 0);
    assert_eq!(special(control, false), special("a", false));
}

#[test]
fn a_chat_prompt_has_its_system_message_and_effort() {
    use checkpoint::chat::{Effort, Message, Role, render};
    let golden = Golden::read("k3_a");
    let tokenizer = checkpoint::tokenizer::Tokenizer::load(&golden.dir).unwrap();
    let question = Message::new(Role::User, "why?");
    let system = Message::new(Role::System, "be brief");
    for (more, messages, effort) in [
        (&[][..], vec![question.clone()], Effort::Off),
        (&["--system", "be brief"], vec![system, question.clone()], Effort::Off),
        (&["--thinking-effort", "low"], vec![question.clone()], Effort::Low),
        (&["--thinking-effort", "max"], vec![question], Effort::Max),
    ] {
        let mut args = vec![
            "run",
            "--model",
            golden.model(),
            "--prompt",
            "why?",
            "--max-tokens",
            "2",
            "--json",
        ];
        args.extend(more);
        let expected: Vec<u64> = render(&tokenizer, &messages, effort)
            .into_iter()
            .map(u64::from)
            .collect();
        assert_eq!(numbers(&json(&run(args))["prompt_ids"]), expected, "{more:?}");
    }
}
