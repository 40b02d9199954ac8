//! What the streamer itself costs for each piece that it has read: the decision, the books, the event.
//!
//! `cargo run --release -p drives --example decision_cost` (Linux) reads experts of Kimi K3's size from simulated drives that write
//! no bytes, so that nearly all of the time is the streamer's own. The arena has 32 slots; each expert is on some drives at random.

use std::error::Error;
use std::sync::Arc;

use drives::{
    Arena, ExpertId, Extent, Home, LayoutBuilder, SimBackend, SimDrive, SimRandom, StreamOptions, Streamer,
    VirtualClock,
};

/// Bytes of an expert of Kimi K3.
const EXPERT_BYTES: u64 = 17_547_264;
const SLOTS: usize = 32;

fn main() -> Result<(), Box<dyn Error>> {
    println!(
        "{:>7}{:>9}{:>9}{:>9}{:>12}{:>14}",
        "drives", "depth", "experts", "chunk", "pieces", "us a piece"
    );
    for (drives, depth) in [(1, 4), (4, 4), (4, 16), (8, 16)] {
        for (experts, times) in [(16, 100), (896, 2)] {
            for chunk in [4 << 20, 512 << 10] {
                let (pieces, us) = measure(drives, depth, experts, times, chunk)?;
                let kib = chunk >> 10;
                println!("{drives:>7}{depth:>9}{experts:>9}{kib:>6}KiB{pieces:>12}{us:>14.2}");
            }
        }
    }
    Ok(())
}

/// Pieces read, and microseconds for each. Each expert is on some drives at random.
fn measure(
    drives: usize,
    depth: usize,
    experts: u32,
    times: usize,
    chunk: usize,
) -> Result<(u64, f64), Box<dyn Error>> {
    let mut builder = LayoutBuilder::new();
    let whole = u64::from(experts) * EXPERT_BYTES;
    let files: Vec<_> = (0..drives)
        .map(|drive| {
            let drive = builder.virtual_drive(&drive.to_string());
            builder.virtual_file(drive, "experts", whole)
        })
        .collect();
    let mut random = SimRandom::new(1);
    let ids: Vec<ExpertId> = (0..experts).map(|expert| ExpertId { layer: 0, expert }).collect();
    for &id in &ids {
        let offset = u64::from(id.expert) * EXPERT_BYTES;
        let extent = Extent {
            page_offset: (offset % 4096) as u16,
            len: EXPERT_BYTES,
        };
        builder.shape(id, &[extent])?;
        let holders = 1 + random.below((1 << drives) - 1);
        for (drive, &file) in files.iter().enumerate() {
            if holders >> drive & 1 == 1 {
                let home = Home {
                    file,
                    offset,
                    start: 0,
                    len: EXPERT_BYTES,
                };
                builder.home(id, 0, home)?;
            }
        }
    }
    let layout = Arc::new(builder.build()?);
    let clock = Arc::new(VirtualClock::default());
    let drive = SimDrive {
        depth,
        jitter: 0.1,
        ..SimDrive::default()
    };
    let backend = SimBackend::new(layout.clone(), &[drive], None, clock.clone(), 0);
    let options = StreamOptions {
        chunk_bytes: chunk,
        ..StreamOptions::default()
    };
    let arena = Arena::new(SLOTS * layout.slot_bytes(), layout.slot_bytes())?;
    let mut streamer = Streamer::single_threaded(layout, arena, Box::new(backend), clock, &options)?;
    let begin = processor_ns()?;
    for _ in 0..times {
        let barrier = streamer.demand(&ids)?;
        while streamer.next(&barrier)?.is_some() {}
    }
    let pieces = streamer.counters().reads;
    Ok((pieces, (processor_ns()? - begin) as f64 / 1000.0 / pieces as f64))
}

/// Processor time of this thread in nanoseconds. Others' work on the machine does not count.
fn processor_ns() -> Result<u64, Box<dyn Error>> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat")?;
    Ok(text
        .split(' ')
        .next()
        .ok_or("no processor time in schedstat")?
        .parse()?)
}
