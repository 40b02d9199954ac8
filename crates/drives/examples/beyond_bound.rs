//! How much longer a barrier takes than its drive needs for the bytes: what scheduling, the thread and the last pieces cost.
//!
//! `cargo run --release -p drives --example beyond_bound -- FOLDER [ROUNDS]` writes a file of experts of Kimi K3's size into FOLDER, and reads
//! it in rounds, from memory and from the drive: once in plain chunks, which gives the drive's rate, and once as barriers of 16
//! experts through the streamer. The file is removed at the end.

use std::collections::VecDeque;
use std::io::Write;
use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

use drives::{
    Arena, Backend, CHUNK_BYTES, Clock, Completion, DriveId, ExpertId, Layout, LayoutBuilder, MemoryBackend,
    MonotonicClock, Notices, RawReads, ReadRequest, Source, StreamOptions, Streamer, VirtualClock,
};

/// Bytes of an expert of Kimi K3.
const EXPERT_BYTES: u64 = 17_547_264;
const EXPERTS_A_BARRIER: usize = 16;
/// Barriers that the file holds: two take turns.
const BARRIERS: usize = 2;
const DEPTH: usize = 4;
const ROUNDS: usize = 41;
/// What a barrier may take beyond its bound, besides half a chunk of the drive.
const ALLOWED_S: f64 = 0.4e-3;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Memory as a drive in real time: its rate is that of copying.
struct RealTime {
    memory: MemoryBackend,
    clock: Arc<MonotonicClock>,
}

impl RealTime {
    fn stamp(&self, done: &mut [Completion]) {
        let now = self.clock.now_ns();
        done.iter_mut().for_each(|completion| completion.landed_ns = now);
    }
}

impl Backend for RealTime {
    fn depth(&self, drive: DriveId) -> usize {
        self.memory.depth(drive)
    }

    fn submit(&mut self, read: ReadRequest) {
        self.memory.submit(read);
    }

    fn wait(&mut self, done: &mut Vec<Completion>) {
        let before = done.len();
        self.memory.wait(done);
        self.stamp(&mut done[before..]);
    }

    fn wait_at_most(&mut self, limit: Duration, done: &mut Vec<Completion>) {
        let before = done.len();
        self.memory.wait_at_most(limit, done);
        self.stamp(&mut done[before..]);
    }

    fn waker(&self) -> Waker {
        self.memory.waker()
    }

    fn describe(&self) -> String {
        "memory".into()
    }
}

/// One way to read, twice: plain chunks, and barriers.
struct Way {
    name: String,
    plain: RawReads,
    streamer: Streamer,
    /// Bytes a second of each round's plain reads.
    rates: Vec<f64>,
    /// Seconds of each round's barrier beyond its bytes at that rate, and the barrier's whole time.
    beyond: Vec<(f64, f64)>,
}

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let folder = args.next().ok_or("usage: beyond_bound FOLDER [ROUNDS]")?;
    let rounds = args.next().map_or(Ok(ROUNDS), |text| text.parse())?;
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    let contents: Vec<u8> = (0..EXPERT_BYTES * (EXPERTS_A_BARRIER * BARRIERS) as u64)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect();
    file.write_all(&contents)?;
    file.as_file().sync_all()?;
    let mut builder = LayoutBuilder::new();
    let shard = builder.file(file.path())?;
    for expert in 0..(EXPERTS_A_BARRIER * BARRIERS) as u32 {
        let source = Source {
            file: shard,
            offset: u64::from(expert) * EXPERT_BYTES,
            len: EXPERT_BYTES,
        };
        builder.expert(ExpertId { layer: 0, expert }, &[source])?;
    }
    let layout = Arc::new(builder.build()?);
    let (clock, notices) = (Arc::new(MonotonicClock::new()), Notices::default());
    let memory = |_: &Arc<Arena>| -> Result<Box<dyn Backend>> {
        let virtual_clock = Arc::new(VirtualClock::default());
        let memory = MemoryBackend::new(Arc::clone(&layout), vec![contents.clone()], DEPTH, virtual_clock);
        let clock = clock.clone();
        Ok(Box::new(RealTime { memory, clock }))
    };
    let drive = |arena: &Arc<Arena>| -> Result<Box<dyn Backend>> {
        Ok(drives::open_best(&layout, arena, &[DEPTH], clock.clone(), &notices)?)
    };
    let mut ways = [way(&layout, &clock, memory)?, way(&layout, &clock, drive)?];
    for notice in notices.take() {
        println!("{notice}");
    }
    for round in 0..rounds {
        for way in &mut ways {
            // Each comes first as often as the other.
            let number = round / 2 % BARRIERS;
            let early = (round % 2 == 0).then(|| plain(&mut way.plain)).transpose()?;
            let (bytes, seconds) = barrier(&mut way.streamer, number)?;
            let rate = early.map_or_else(|| plain(&mut way.plain), Ok)?;
            way.rates.push(rate);
            way.beyond.push((seconds - bytes as f64 / rate, seconds));
        }
    }
    for way in &mut ways {
        let rate = median(way.rates.clone());
        let beyond = median(way.beyond.iter().map(|(beyond, _)| *beyond).collect());
        let seconds = median(way.beyond.iter().map(|(_, seconds)| *seconds).collect());
        let allowed = ALLOWED_S + CHUNK_BYTES as f64 / rate / 2.0;
        println!(
            "{}: {:.2} GB/s, barriers of {EXPERTS_A_BARRIER} experts in {:.2} ms, {:.2} ms beyond the bound, {:.2} ms allowed{}",
            way.name,
            rate / 1e9,
            seconds * 1e3,
            beyond * 1e3,
            allowed * 1e3,
            if beyond <= allowed { "" } else { ": too much" }
        );
        let all: Vec<String> = way
            .beyond
            .iter()
            .map(|(beyond, _)| format!("{:.2}", beyond * 1e3))
            .collect();
        println!("  each round, ms beyond: {}", all.join(" "));
    }
    Ok(())
}

fn way(
    layout: &Arc<Layout>,
    clock: &Arc<MonotonicClock>,
    open: impl Fn(&Arc<Arena>) -> Result<Box<dyn Backend>>,
) -> Result<Way> {
    // As much memory as barriers land in: what stays in the processor's caches is written faster.
    let chunks = Arena::new(EXPERTS_A_BARRIER * layout.slot_bytes(), CHUNK_BYTES)?;
    let backend = open(&chunks)?;
    let name = backend.describe();
    let slots = Arena::new(EXPERTS_A_BARRIER * layout.slot_bytes(), layout.slot_bytes())?;
    let backend_of_streamer = open(&slots)?;
    Ok(Way {
        name,
        plain: RawReads::new(backend, Arc::clone(layout), chunks),
        streamer: Streamer::start(
            Arc::clone(layout),
            slots,
            backend_of_streamer,
            clock.clone(),
            &StreamOptions::default(),
        )?,
        rates: vec![],
        beyond: vec![],
    })
}

/// Reads the file in whole chunks, always [`DEPTH`] of them in flight: bytes a second.
fn plain(reads: &mut RawReads) -> Result<f64> {
    let layout = reads.layout();
    let home = layout.homes(ExpertId { layer: 0, expert: 0 }, 0).ok_or("no home")?[0];
    let chunks = layout.files()[home.file.index()].len / CHUNK_BYTES as u64;
    // What has landed is kept as long as there is room, so that chunks land all over the arena, as experts do.
    let (mut landed, mut kept) = (vec![], VecDeque::new());
    let mut take = |reads: &mut RawReads| -> Result<()> {
        reads.wait(&mut landed);
        for landing in landed.drain(..) {
            kept.push_back(landing.outcome?);
        }
        if reads.arena().free_slots() == 0 {
            kept.pop_front();
        }
        Ok(())
    };
    let start = Instant::now();
    for chunk in 0..chunks {
        while reads.in_flight() == DEPTH || !reads.start(home.file, chunk * CHUNK_BYTES as u64, CHUNK_BYTES) {
            take(reads)?;
        }
    }
    while reads.in_flight() > 0 {
        take(reads)?;
    }
    Ok(chunks as f64 * CHUNK_BYTES as f64 / start.elapsed().as_secs_f64())
}

/// Reads a barrier through the streamer: its bytes, and the seconds from the demand to the last landing.
fn barrier(streamer: &mut Streamer, number: usize) -> Result<(u64, f64)> {
    let first = (number * EXPERTS_A_BARRIER) as u32;
    let experts: Vec<ExpertId> = (first..first + EXPERTS_A_BARRIER as u32)
        .map(|expert| ExpertId { layer: 0, expert })
        .collect();
    let before = streamer.barriers(0).next();
    let barrier = streamer.demand(&experts)?;
    while streamer.next(&barrier)?.is_some() {}
    let report = streamer.barriers(before).barriers[0];
    Ok((report.device_bytes, report.time_ns as f64 / 1e9))
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
