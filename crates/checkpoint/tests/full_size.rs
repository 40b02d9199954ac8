//! A full-size Kimi K3 as headers over holes: the published files come out, and opening one is quick and small.

#![cfg(target_os = "linux")]

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use checkpoint::{Checkpoint, Dtype, survey, synthesize};

const CONFIG: &str = include_str!("../testdata/kimi-k3-config.json");

/// Where the child process looks for the checkpoint.
const DIR_VARIABLE: &str = "CHECKPOINT_FULL_SIZE_DIR";

/// The most memory that opening and surveying may take.
const PEAK_BYTES: u64 = 300_000_000;

/// Time allowed on a slow, busy machine; a quiet one needs a tenth of it in a release build.
const PATIENCE: Duration = Duration::from_secs(20);

#[test]
fn a_full_size_k3_opens_in_little_time_and_memory() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("k3");
    let (mut calls, mut last) = (0, 0);
    let summary = synthesize(CONFIG, 1, &out, true, &mut |progress| {
        assert!(
            progress.bytes > last && progress.bytes <= progress.total,
            "{progress:?}"
        );
        (calls, last) = (calls + 1, progress.bytes);
    })
    .unwrap();
    // The totals of the published index and files.
    assert_eq!((summary.shards, summary.tensors), (96, 497_220));
    assert_eq!(summary.tensor_bytes, 1_560_860_324_864);
    assert_eq!(summary.file_bytes, 1_560_936_091_448);
    assert_eq!((calls, last), (96, summary.file_bytes));
    check_shard_lengths(&out);

    // In a process of its own, so that the peak is that of reading.
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "measure_in_a_process_of_its_own", "--nocapture"])
        .env(DIR_VARIABLE, &out)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&child.stdout);
    assert!(
        child.status.success(),
        "{text}{}",
        String::from_utf8_lossy(&child.stderr)
    );
    assert!(text.contains("peak"), "{text}");
    println!("{text}");
}

/// Lengths of the release's files.
fn check_shard_lengths(out: &Path) {
    let len = |number: usize| {
        let name = format!("model-{number:05}-of-000096.safetensors");
        std::fs::metadata(out.join(name)).unwrap().len()
    };
    assert_eq!(len(1), 2_341_216_112);
    assert_eq!(len(51), 16_990_916_912);
    assert_eq!(len(95), 92_289_328);
    assert_eq!(len(96), 802_448_352);
    let mut lens: Vec<u64> = (1..=96).map(len).collect();
    lens.sort_unstable();
    assert_eq!(
        (lens[0], lens[48], lens[95]),
        (92_289_328, 16_990_916_912, 16_990_916_912)
    );
}

/// Does nothing unless the test above starts it.
#[test]
fn measure_in_a_process_of_its_own() {
    let Some(dir) = std::env::var_os(DIR_VARIABLE) else {
        return;
    };
    let dir = Path::new(&dir);
    let start = Instant::now();
    let checkpoint = Checkpoint::open(dir).unwrap();
    let opened = start.elapsed();
    let survey = survey(dir).unwrap();
    let surveyed = start.elapsed();
    let peak = peak_bytes();
    println!("open {opened:?}, open and survey {surveyed:?}, peak {peak} bytes");

    assert_eq!(
        (survey.problem_count, survey.bytes_to_come),
        (0, 0),
        "{:?}",
        survey.problems
    );
    assert_eq!((survey.shards_complete(), survey.tensors()), (96, 497_220));
    assert_eq!(survey.tensors_by_dtype[&Dtype::U8], 494_592);
    assert_eq!(survey.tensors_by_dtype[&Dtype::Bf16], 2_122);
    assert_eq!(survey.tensors_by_dtype[&Dtype::F32], 506);
    assert_eq!((survey.experts_found, survey.experts_contiguous), (82_432, 82_432));
    assert_eq!(survey.sizes.unwrap().trunk(), 113_509_540_864);
    assert_eq!(survey.vision_bytes, 2 * (401_214_464 + 46_144_512));
    assert_eq!(
        (checkpoint.max_extents(), checkpoint.max_expert_bytes()),
        (1, 17_547_264)
    );
    assert_eq!(checkpoint.stop_ids(), [163_585, 163_586]);
    let last = checkpoint.expert(92, 895).unwrap();
    assert_eq!((last.extents()[0].shard, last.bytes()), (92, 17_547_264));

    assert!(peak < PEAK_BYTES, "peak {peak} bytes, expected less than {PEAK_BYTES}");
    assert!(surveyed < PATIENCE, "{surveyed:?}, expected less than {PATIENCE:?}");
}

/// VmHWM: the most memory that this process has had resident.
fn peak_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() * 1024
}
