//! `anabranch inspect`, on whole, incomplete and very large checkpoints.

mod common;

use std::fs;

use common::{Folder, run, stderr, stdout};
use serde_json::Value;

const K3: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../checkpoint/testdata/kimi-k3-config.json"
);

/// The most memory that inspecting a full-size K3 may take.
#[cfg(target_os = "linux")]
const PEAK_BYTES: u64 = 300_000_000;

#[test]
fn an_incomplete_folder_is_reported_whole() {
    let folder = Folder::new();
    let model = folder.path().to_str().unwrap();
    let whole = run(["inspect", model]);
    assert!(whole.status.success());
    assert!(stdout(&whole).contains("nothing is missing"));

    let missing = fs::metadata(folder.shard(3)).unwrap().len();
    fs::remove_file(folder.shard(3)).unwrap();
    folder.edit_bytes(7, |bytes| bytes.truncate(bytes.len() - 777));
    fs::remove_file(folder.path().join("config.json")).unwrap();
    fs::write(folder.path().join("config.json"), common::TINY).unwrap();
    let output = run(["inspect", model]);
    let text = stdout(&output);
    for part in [
        "missing or wrong: 2 problems",
        "model-00003-of-000014",
        "model-00007-of-000014",
        "12 of 14 shards complete",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let line = common::error_line(&output);
    assert!(
        line.contains("found 2 problems, expected a complete checkpoint"),
        "{line}"
    );

    let output = run(["inspect", model, "--json"]);
    assert_eq!(output.status.code(), Some(1));
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["problem_count"], 2);
    assert_eq!(json["problems"].as_array().unwrap().len(), 2);
    // The header of a missing shard is not counted.
    let to_come = json["bytes_to_come"].as_u64().unwrap();
    assert!(
        to_come > missing / 2 && to_come <= missing + 777,
        "{to_come} of {missing}"
    );

    fs::remove_file(folder.path().join("config.json")).unwrap();
    let output = run(["inspect", model]);
    assert!(stdout(&output).contains("config.json"), "{}", stdout(&output));
    common::error_line(&output);
}

#[test]
fn the_least_that_it_names_is_enough() {
    let folder = Folder::new();
    let model = folder.path().to_str().unwrap();
    let json: Value = serde_json::from_slice(&run(["inspect", model, "--json"]).stdout).unwrap();
    let least = json["memory"]["least"]["total"].as_u64().unwrap().to_string();
    let positions = json["memory"]["positions"].to_string();
    let with = |memory: &str| {
        run([
            "run",
            "--model",
            model,
            "--ids",
            "1",
            "--max-tokens",
            "1",
            "--context",
            &positions,
            "--memory",
            memory,
        ])
    };
    let output = with(&least);
    assert!(output.status.success(), "{}", stderr(&output));
    let too_little = run(["inspect", model, "--memory", "1M"]);
    assert!(too_little.status.success());
    assert!(
        stdout(&too_little).contains("are too little, by "),
        "{}",
        stdout(&too_little)
    );
}

/// Headers of the published size over holes; the time allowed here is for a busy machine and a build with checks.
#[test]
#[cfg(target_os = "linux")]
fn a_full_size_k3_is_inspected_in_little_time_and_memory() {
    use std::time::{Duration, Instant};
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("k3");
    let out = out.to_str().unwrap();
    let made = run(["synth", "--config", K3, "--seed", "1", "--out", out, "--sparse"]);
    assert!(made.status.success(), "{}", stderr(&made));
    assert!(
        stderr(&made).contains("497,220 tensors in 96 shards"),
        "{}",
        stderr(&made)
    );
    let start = Instant::now();
    let output = run(["inspect", out, "--json"]);
    let took = start.elapsed();
    assert!(output.status.success(), "{}", stderr(&output));
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    println!("{took:?}, {} bytes", json["peak_memory_bytes"]);
    assert!(took < Duration::from_secs(20), "{took:?}");
    assert!(
        json["peak_memory_bytes"].as_u64().unwrap() < PEAK_BYTES,
        "{}",
        json["peak_memory_bytes"]
    );
    assert_eq!(
        (json["shards_complete"].as_u64(), json["tensors"].as_u64()),
        (Some(96), Some(497_220))
    );
    assert_eq!(json["model"]["trunk_bytes"], 113_509_540_864u64);
    assert_eq!(json["memory"]["machine_gib"], 128);
    assert_eq!(json["memory"]["state_bytes_per_token"], 55_296);
    // What is left after the trunk and the fixed part of a state.
    let roomy: Value = serde_json::from_slice(&run(["inspect", out, "--json", "--memory", "128GiB"]).stdout).unwrap();
    let most = roomy["memory"]["most_positions"].as_u64().unwrap();
    let left = (128u64 << 30) - roomy["memory"]["least"]["total"].as_u64().unwrap();
    assert!((4096 + left / 55_296).abs_diff(most) <= 256, "{most}");
    let half: Value = serde_json::from_slice(&run(["inspect", out, "--json", "--kv", "bf16"]).stdout).unwrap();
    assert_eq!(half["memory"]["state_bytes_per_token"], 27_648);
    assert_eq!(
        (&half["memory"]["kv"], &json["memory"]["kv"]),
        (&"bf16".into(), &"f32".into())
    );
    let text = stdout(&run(["inspect", out]));
    assert!(text.contains("the trunk is 113.5 GB in bf16"), "{text}");
    assert!(text.contains("a machine with 128 GiB could run it"), "{text}");
}
