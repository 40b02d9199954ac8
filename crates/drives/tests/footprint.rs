//! What streaming costs: memory of the arena and no more, and no processor time while idle. One test, alone in its process,
//! because the system counts both per process.
#![cfg(target_os = "linux")]

mod common;

use std::io::Write;
use std::time::Duration;

use common::{World, byte, id, on_threads};
use drives::{AlignedBuf, CHUNK_BYTES, DEFAULT_DEPTH, DirectFile, LayoutBuilder, Notices, Source};

/// A line of /proc/self/status, in bytes.
fn status_bytes(name: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(name)).unwrap();
    let kib: u64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    kib * 1024
}

/// Starts the peak of resident memory afresh and returns what is resident now.
fn reset_peak() -> u64 {
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    status_bytes("VmRSS")
}

/// Number of the crate's threads and their processor time in nanoseconds.
fn processor_ns() -> (usize, u64) {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let line = |task: &std::path::Path, name| std::fs::read_to_string(task.join(name)).unwrap();
    tasks
        .map(|task| task.unwrap().path())
        .filter(|task| {
            ["drives", "read-"]
                .iter()
                .any(|name| line(task, "comm").starts_with(name))
        })
        .map(|task| {
            line(&task, "schedstat")
                .split(' ')
                .next()
                .unwrap()
                .parse::<u64>()
                .unwrap()
        })
        .fold((0, 0), |(threads, sum), ns| (threads + 1, sum + ns))
}

#[test]
fn memory_is_bounded_and_idleness_is_free() {
    const EXPERT: u64 = 3_000_001;
    const EXPERTS: usize = 24;
    const SLACK: u64 = 6 << 20;
    let world = World::row(EXPERTS, EXPERT);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("shard");
    let mut out = std::io::BufWriter::new(std::fs::File::create(&path).unwrap());
    for offset in 0..world.files[0] {
        out.write_all(&[byte(0, offset)]).unwrap();
    }
    drop(out);
    let mut builder = LayoutBuilder::new();
    let file = builder.file(&path).unwrap();
    for (expert, extents) in world.experts.iter().enumerate() {
        let (_, offset, len) = extents[0];
        builder.expert(id(expert), &[Source { file, offset, len }]).unwrap();
    }
    let layout = std::sync::Arc::new(builder.build().unwrap());

    let before = reset_peak();
    let mut streamer = on_threads(&layout, 6, CHUNK_BYTES);
    for _ in 0..2 {
        let barrier = streamer.demand(&world.ids()).unwrap();
        while let Some(landed) = streamer.next(&barrier).unwrap() {
            world.check(&landed);
        }
    }
    let peak = status_bytes("VmHWM") - before;
    let arena = streamer.arena().bytes() as u64;
    assert!(peak <= arena + SLACK, "{peak} bytes at the peak, arena {arena}");
    assert!(peak >= arena * 9 / 10, "the measure sees the arena: {peak} of {arena}");

    std::thread::sleep(Duration::from_millis(50));
    let (threads, busy) = processor_ns();
    assert_eq!(threads, 1 + DEFAULT_DEPTH);
    assert!(busy > 0, "the measure sees the reads");
    std::thread::sleep(Duration::from_millis(400));
    let idle = processor_ns().1 - busy;
    assert!(idle < 1_000_000, "{idle} ns of processor time in 400 ms of idleness");
    drop(streamer);

    let before = reset_peak();
    let direct = DirectFile::open(&path, &Notices::default()).unwrap();
    let buf = AlignedBuf::read_range(&direct, 777, 30_000_000, 2).unwrap();
    assert!(
        buf.bytes().iter().step_by(4999).eq((0..30_000_000u64)
            .step_by(4999)
            .map(|at| byte(0, 777 + at))
            .collect::<Vec<_>>()
            .iter())
    );
    let peak = status_bytes("VmHWM") - before;
    assert!(
        (30_000_000..=30_000_000 + SLACK).contains(&peak),
        "{peak} bytes for 30 MB"
    );
    assert_eq!(buf.memory_bytes() % 4096, 0);
    drop(buf);
    assert!(status_bytes("VmRSS") <= before + SLACK, "the buffer is freed");
}
