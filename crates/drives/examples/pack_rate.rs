//! Measures packs: checksums in memory, then writing and verifying a pack.
//!
//! ```text
//! cargo run --release -p drives --example pack_rate -- FILE FOLDER
//! ```
//!
//! FILE, of at least 17 MB, stands for a shard and is cut into experts of Kimi K3's size; FOLDER, on the drive to measure, gets the
//! pack, which is removed again. Numbers are bytes of experts.

use drives::{
    CHECKSUM_CHUNK_BYTES, ExpertId, FileIdentity, Notices, PackContents, PackPhase, PackRange, PackShard, write_pack,
};
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::Instant;

/// Bytes of an expert of Kimi K3.
const EXPERT_BYTES: u64 = 17_547_264;
/// Bytes in front of the first expert, so that it begins inside a page.
const HEAD_BYTES: u64 = 824;
/// Rounds of each measurement; the best counts.
const ROUNDS: usize = 5;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args_os().skip(1).map(PathBuf::from);
    let (Some(shard), Some(folder)) = (arguments.next(), arguments.next()) else {
        return Err("expected FILE and FOLDER".into());
    };
    checksums();

    let identity = FileIdentity::read(&shard, HEAD_BYTES)?;
    let experts = identity.len.saturating_sub(HEAD_BYTES) / EXPERT_BYTES;
    let range = |expert: u64| PackRange {
        expert: ExpertId {
            layer: 0,
            expert: expert as u32,
        },
        extent: 0,
        shard: 0,
        extent_offset: HEAD_BYTES + expert * EXPERT_BYTES,
        extent_len: EXPERT_BYTES,
        start: 0,
        len: EXPERT_BYTES,
        offset: 0,
    };
    let record = PackShard {
        name: "shard".into(),
        identity,
    };
    let contents = PackContents::new(CHECKSUM_CHUNK_BYTES, vec![record], (0..experts).map(range).collect())?;
    let path = folder.join("rate.pack");
    let start = Instant::now();
    let mut written = None;
    let mut progress = |at: drives::PackProgress| {
        if at.phase == PackPhase::Verify {
            written.get_or_insert_with(|| start.elapsed().as_secs_f64());
        }
        ControlFlow::Continue(())
    };
    write_pack(&path, &contents, &[shard], &Notices::default(), &mut progress)?;
    let total = start.elapsed().as_secs_f64();
    std::fs::remove_file(&path)?;
    let megabytes = contents.expert_bytes() as f64 / 1e6;
    let overhead = contents.file_len() - contents.expert_bytes();
    println!("{experts} experts, {megabytes:.0} MB, {overhead} bytes for the index and part-filled pages");
    if let Some(written) = written {
        let rate = |seconds: f64| megabytes / seconds;
        println!(
            "read, checksum, write, sync  {:7.0} MB/s\nread back and compare         {:7.0} MB/s",
            rate(written),
            rate(total - written)
        );
    }
    Ok(())
}

/// The rate of the checksum on one core, in the pieces in which it is used.
fn checksums() {
    let mut state = 1u64;
    let mut noise = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 56) as u8
    };
    let bytes: Vec<u8> = (0..EXPERT_BYTES).map(|_| noise()).collect();
    let mut best = f64::INFINITY;
    let mut sum = 0u32;
    for _ in 0..ROUNDS {
        let start = Instant::now();
        for chunk in bytes.chunks(CHECKSUM_CHUNK_BYTES as usize) {
            sum = sum.wrapping_add(crc32c::crc32c(chunk));
        }
        best = best.min(start.elapsed().as_secs_f64());
    }
    let rate = EXPERT_BYTES as f64 / best / 1e9;
    println!("checksum, one core            {rate:7.1} GB/s (sum {sum:08x})");
}
