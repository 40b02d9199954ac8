//! The engine's account equals what the kernel counts. Alone in its program, since the kernel counts for a whole process.
#![cfg(target_os = "linux")]

use checkpoint::Checkpoint;
use engine::{Cancel, Engine, Options, PassRows};
use std::path::Path;

/// Part by which the two may differ. Rows of the embedding, a page each, are read beside the experts.
const TOLERANCE: f64 = 0.001;

/// Bytes that this process caused to be read from devices.
fn kernel_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/io").ok()?;
    let line = text.lines().find(|line| line.starts_with("read_bytes"))?;
    line.split_once(':')?.1.trim().parse().ok()
}

/// The bench's experts of real size in a model of 0.2 GB.
fn config() -> String {
    let mut config: serde_json::Value =
        serde_json::from_str(include_str!("../../../bench/configs/ladder.json")).unwrap();
    let text = &mut config["text_config"];
    text["num_hidden_layers"] = 3.into();
    text["num_experts"] = 6.into();
    text["num_experts_per_token"] = 2.into();
    text["hidden_size"] = 128.into();
    text["linear_attn_config"]["full_attn_layers"] = serde_json::json!([3]);
    text["linear_attn_config"]["kda_layers"] = serde_json::json!([1, 2]);
    config.to_string()
}

#[test]
fn device_bytes_are_the_kernels() {
    let Some(_) = kernel_bytes() else {
        println!("skipped: /proc/self/io cannot be read");
        return;
    };
    // Beside the build: a temporary folder may be in memory, which no device counts.
    let folder = tempfile::tempdir_in(Path::new(env!("CARGO_TARGET_TMPDIR"))).unwrap();
    checkpoint::synthesize(&config(), 1, &folder.path().join("model"), false, &mut |_| ()).unwrap();
    let checkpoint = Checkpoint::open(&folder.path().join("model")).unwrap();
    let options = Options {
        cache: Some(0),
        ..Options::default()
    };
    let mut engine = Engine::open(checkpoint, &options, &mut |_| ()).unwrap();
    if engine
        .notices()
        .iter()
        .any(|notice| matches!(notice, drives::Notice::Buffered { .. }))
    {
        println!("skipped: direct reads are refused here");
        return;
    }
    let mut sequence = engine.new_sequence();
    let (before, stats) = (kernel_bytes().unwrap(), engine.stats());
    for id in 0..16 {
        let part = &mut [PassRows {
            sequence: &mut sequence,
            ids: &[id],
        }];
        engine.pass(part, &[], &Cancel::default(), None).unwrap();
    }
    engine.settle();
    let kernel = kernel_bytes().unwrap() - before;
    let ours = engine.stats().device_bytes - stats.device_bytes;
    if kernel == 0 {
        println!("skipped: the kernel counts no reads of this file system");
        return;
    }
    let counters = engine.streamer().counters();
    let account = counters.needed_device_bytes + counters.wasted_device_bytes + counters.reread_device_bytes;
    assert_eq!((account, counters.pending_device_bytes), (counters.device_bytes, 0));
    let off = (kernel as f64 - ours as f64).abs() / ours as f64;
    println!("engine {ours} bytes, kernel {kernel}");
    assert!(off <= TOLERANCE, "engine {ours} bytes, kernel {kernel}");
}
