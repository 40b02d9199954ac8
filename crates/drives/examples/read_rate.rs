//! Streams experts of the size of Kimi K3's from a folder and prints the rate.
//!
//! `cargo run --release -p drives --example read_rate -- FOLDER [GIB] [DEPTH] [CHUNK_MIB]` writes a file of GIB GiB (default 2) into
//! FOLDER, reads it twice through an arena of 16 slots, in scattered order, and removes it.

use std::io::Write;
use std::sync::Arc;
use std::time::Instant;

use drives::{
    AlignedBuf, Arena, DEFAULT_DEPTH, DirectFile, ExpertId, LayoutBuilder, MonotonicClock, Notices, Source,
    StreamOptions, Streamer, ThreadBackend,
};

/// Bytes of an expert of Kimi K3.
const EXPERT_BYTES: u64 = 17_547_264;
const SLOTS: usize = 16;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let folder = args.next().ok_or("usage: read_rate FOLDER [GIB] [DEPTH] [CHUNK_MIB]")?;
    let number = |text: Option<String>, default: usize| text.map_or(Ok(default), |text| text.parse());
    let gib = number(args.next(), 2)? as u64;
    let depth = number(args.next(), DEFAULT_DEPTH)?;
    let chunk_mib = number(args.next(), 4)?;

    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    let block: Vec<u8> = (0..8u32 << 20)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect();
    for _ in 0..gib * 128 {
        file.write_all(&block)?;
    }
    file.as_file().sync_all()?;

    let mut builder = LayoutBuilder::new();
    let shard = builder.file(file.path())?;
    let experts = ((gib << 30) - 1000) / EXPERT_BYTES;
    let id = |expert: u64| ExpertId {
        layer: 0,
        expert: expert as u32,
    };
    for expert in 0..experts {
        let source = Source {
            file: shard,
            offset: 1000 + expert * EXPERT_BYTES,
            len: EXPERT_BYTES,
        };
        builder.expert(id(expert), &[source])?;
    }
    let layout = Arc::new(builder.build()?);
    let notices = Notices::default();
    let clock = Arc::new(MonotonicClock::new());
    let arena = Arena::new(SLOTS * layout.slot_bytes(), layout.slot_bytes())?;
    println!("{}", arena.huge_pages());
    let backend = ThreadBackend::open(&layout, depth, clock.clone(), &notices)?;
    let options = StreamOptions {
        chunk_bytes: chunk_mib << 20,
        ..StreamOptions::default()
    };
    let mut streamer = Streamer::start(layout, arena, Box::new(backend), clock, &options)?;
    for notice in notices.take() {
        println!("{notice}");
    }

    // 16 experts a barrier, as a token of Kimi K3 wants of each layer; a stride coprime to the count scatters them.
    let stride = (3..).find(|step| !experts.is_multiple_of(*step)).unwrap_or(1);
    let scattered: Vec<ExpertId> = (0..experts).map(|n| id(n * stride % experts)).collect();
    for run in 0..2 {
        let (start, before) = (Instant::now(), streamer.counters());
        for barrier in scattered.chunks(SLOTS) {
            let barrier = streamer.demand(barrier)?;
            while streamer.next(&barrier)?.is_some() {}
        }
        let seconds = start.elapsed().as_secs_f64();
        let bytes = streamer.counters().device_bytes - before.device_bytes;
        println!(
            "run {run}: {:.0} MB/s, barriers of {SLOTS}",
            bytes as f64 / seconds / 1e6
        );
    }
    let start = Instant::now();
    let barrier = streamer.demand(&scattered)?;
    while streamer.next(&barrier)?.is_some() {}
    let rate = experts as f64 * EXPERT_BYTES as f64 / start.elapsed().as_secs_f64() / 1e6;
    println!("one barrier of {experts}: {rate:.0} MB/s");

    let direct = DirectFile::open(file.path(), &notices)?;
    for threads in [4, 2, 1, 1, 4] {
        let start = Instant::now();
        let buf = AlignedBuf::read_range(&direct, 5, 1 << 30, threads)?;
        let rate = buf.bytes().len() as f64 / start.elapsed().as_secs_f64() / 1e6;
        println!("one range of 1 GiB on {threads} threads: {rate:.0} MB/s");
    }
    Ok(())
}
