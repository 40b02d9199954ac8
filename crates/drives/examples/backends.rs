//! Compares back ends: the rate, and what reading costs of the processor.
//!
//! `cargo run --release -p drives --example backends -- FOLDER [GB] [DEPTH] [CHUNK_MIB]` writes a file of GB gigabytes (default 2) into
//! FOLDER, reads it several times with each back end in turn, at scattered offsets, and removes it.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use drives::{
    Arena, Backend, ExpertId, FileId, LayoutBuilder, MonotonicClock, Notices, RawReads, Source, ThreadBackend,
};
use rustix::time::{ClockId, clock_gettime};

const ROUNDS: usize = 5;
const IDLE: Duration = Duration::from_secs(1);

/// Processor time of all threads of this process, in seconds.
fn processor_seconds() -> f64 {
    let now = clock_gettime(ClockId::ProcessCPUTime);
    now.tv_sec as f64 + now.tv_nsec as f64 / 1e9
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let folder = args.next().ok_or("usage: backends FOLDER [GB] [DEPTH] [CHUNK_MIB]")?;
    let number = |text: Option<String>, default: usize| text.map_or(Ok(default), |text| text.parse());
    let bytes = number(args.next(), 2)? as u64 * 1_000_000_000;
    let depth = number(args.next(), 4)?;
    let chunk = number(args.next(), 4)? << 20;

    let file = write_file(Path::new(&folder), bytes)?;
    let mut builder = LayoutBuilder::new();
    let shard = builder.file(file.path())?;
    let source = Source {
        file: shard,
        offset: 0,
        len: bytes.min(1 << 30),
    };
    builder.expert(ExpertId { layer: 0, expert: 0 }, &[source])?;
    let layout = Arc::new(builder.build()?);
    let notices = Notices::default();
    let clock = Arc::new(MonotonicClock::new());

    let mut results: Vec<(String, Vec<(f64, f64)>)> = Vec::new();
    for round in 0..ROUNDS {
        for kind in ["threads", "io_uring"] {
            let arena = Arena::new(depth * chunk, chunk)?;
            let backend: Box<dyn Backend> = match kind {
                "threads" => Box::new(ThreadBackend::open(&layout, depth, clock.clone(), &notices)?),
                _ => drives::open_best(&layout, &arena, &[depth], clock.clone(), &notices)?,
            };
            let name = backend.describe();
            let mut reads = RawReads::new(backend, Arc::clone(&layout), arena);
            read_all(&mut reads, shard, bytes / 8, chunk)?;
            let (start, before) = (Instant::now(), processor_seconds());
            read_all(&mut reads, shard, bytes, chunk)?;
            let seconds = start.elapsed().as_secs_f64();
            let cost = processor_seconds() - before;
            let gigabytes = bytes as f64 / 1e9;
            println!(
                "round {round}, {name}: {:.0} MB/s, {:.4} CPU seconds per GB",
                gigabytes * 1e3 / seconds,
                cost / gigabytes
            );
            match results.iter_mut().find(|(known, _)| *known == name) {
                Some((_, runs)) => runs.push((gigabytes / seconds, cost / gigabytes)),
                None => results.push((name.clone(), vec![(gigabytes / seconds, cost / gigabytes)])),
            }
            if round == 0 {
                println!(
                    "idle, {name}: {:.2} ms of the processor in a second",
                    idle(&mut reads) * 1e3
                );
            }
        }
    }
    for notice in notices.take() {
        println!("{notice}");
    }
    for (name, mut runs) in results {
        runs.sort_by(|a, b| a.0.total_cmp(&b.0));
        let rate = runs[runs.len() / 2].0;
        runs.sort_by(|a, b| a.1.total_cmp(&b.1));
        let cost = runs[runs.len() / 2].1;
        println!(
            "median of {}, {name}: {:.0} MB/s, {cost:.4} CPU seconds per GB, so 2 GB/s cost {:.1} % of a core",
            runs.len(),
            rate * 1e3,
            cost * 200.0
        );
    }
    Ok(())
}

fn write_file(folder: &Path, bytes: u64) -> std::io::Result<tempfile::NamedTempFile> {
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    let block: Vec<u8> = (0..8u32 << 20)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect();
    let mut left = bytes;
    while left > 0 {
        let part = left.min(block.len() as u64) as usize;
        file.write_all(&block[..part])?;
        left -= part as u64;
    }
    file.as_file().sync_all()?;
    Ok(file)
}

/// Reads `bytes` of the file in whole chunks, scattered, with every slot of the arena in flight.
fn read_all(reads: &mut RawReads, file: FileId, bytes: u64, chunk: usize) -> Result<(), drives::ReadError> {
    let chunks = bytes / chunk as u64;
    // A step without a common divisor visits each chunk once.
    let stride = (chunks * 5 / 8 + 1..)
        .find(|&step| common_divisor(step, chunks) == 1)
        .unwrap_or(1);
    let mut landed = Vec::new();
    for read in 0..chunks {
        while !reads.start(file, read * stride % chunks * chunk as u64, chunk) {
            reads.wait(&mut landed);
            landed.drain(..).try_for_each(|landing| landing.outcome.map(drop))?;
        }
    }
    while reads.in_flight() > 0 {
        reads.wait(&mut landed);
        landed.drain(..).try_for_each(|landing| landing.outcome.map(drop))?;
    }
    Ok(())
}

fn common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { common_divisor(b, a % b) }
}

/// Processor seconds that a back end takes while it waits for nothing.
fn idle(reads: &mut RawReads) -> f64 {
    let waker = reads.waker();
    let alarm = std::thread::spawn(move || {
        std::thread::sleep(IDLE);
        waker.wake();
    });
    let before = processor_seconds();
    reads.wait(&mut Vec::new());
    let used = processor_seconds() - before;
    // The alarm only sleeps and rings.
    let _ = alarm.join();
    used
}
