//! Reading a pack's data and comparing it with the checksums.

use std::ops::ControlFlow;
use std::path::Path;

use super::{BATCH_BYTES, Batch, Chunk, PackError, PackIndex, PackPhase, PackProgress, batches};
use crate::error::ReadError;
use crate::file::DirectFile;
use crate::layout::ExpertId;
use crate::map::AlignedMap;
use crate::notice::Notices;

/// A chunk that is not as it was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BadChunk {
    /// The expert.
    pub expert: ExpertId,
    /// Which of its extents.
    pub extent: u32,
    /// First byte of the chunk, counted from the extent's start.
    pub start: u64,
    /// Bytes of the chunk.
    pub len: u64,
    /// First byte of the chunk in the pack.
    pub offset: u64,
    /// Whether it cannot be read, or differs from its checksum.
    pub reason: String,
}

/// What a pack was found to hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackReport {
    /// Ranges of experts.
    pub ranges: usize,
    /// Chunks, each with a checksum.
    pub chunks: usize,
    /// Bytes of experts.
    pub bytes: u64,
    /// The chunks that are damaged, by their place in the pack.
    pub bad: Vec<BadChunk>,
}

/// Reads all of a pack and compares it with its checksums. Damage is part of the report.
///
/// # Errors
///
/// As [`PackIndex::open`]; [`PackError::Stopped`] when `progress` breaks.
pub fn verify_pack(
    path: &Path,
    notices: &Notices,
    progress: &mut dyn FnMut(PackProgress) -> ControlFlow<()>,
) -> Result<PackReport, PackError> {
    verify(&PackIndex::open(path, notices)?, notices, progress)
}

/// As [`verify_pack`], but damage is an error. `name` is what the pack will be called.
pub(super) fn expect_sound(
    index: &PackIndex,
    name: &Path,
    notices: &Notices,
    progress: &mut dyn FnMut(PackProgress) -> ControlFlow<()>,
) -> Result<(), PackError> {
    match verify(index, notices, progress)?.bad.first() {
        None => Ok(()),
        Some(bad) => Err(PackError::malformed(
            name,
            format!(
                "expert {} at offset {} read back wrong ({})",
                bad.expert, bad.offset, bad.reason
            ),
            "what was written; the drive or its cable is faulty",
        )),
    }
}

pub(super) fn verify(
    index: &PackIndex,
    notices: &Notices,
    progress: &mut dyn FnMut(PackProgress) -> ControlFlow<()>,
) -> Result<PackReport, PackError> {
    let file = DirectFile::open(&index.path, notices)?;
    let memory = &mut AlignedMap::new(BATCH_BYTES)?;
    let memory = &mut memory.map[memory.start..][..BATCH_BYTES];
    let contents = &index.contents;
    let mut report = PackReport {
        ranges: contents.ranges.len(),
        chunks: contents.chunk_total(),
        bytes: 0,
        bad: Vec::new(),
    };
    let total = contents.expert_bytes();
    for batch in batches(contents) {
        let pages = &mut memory[..batch.span()];
        if compare(&file, &batch, index, pages, &mut report.bad).is_err() {
            compare_singly(&file, &batch, index, pages, &mut report.bad);
        }
        report.bytes += batch.len() as u64;
        let at = PackProgress {
            phase: PackPhase::Verify,
            bytes: report.bytes,
            total,
        };
        if progress(at).is_break() {
            return Err(PackError::Stopped {
                path: index.path.clone(),
            });
        }
    }
    Ok(report)
}

/// Reads a batch and adds the chunks that differ from their checksums.
fn compare(
    file: &DirectFile,
    batch: &Batch,
    index: &PackIndex,
    pages: &mut [u8],
    found: &mut Vec<BadChunk>,
) -> Result<(), ReadError> {
    file.read_exact_at(pages, batch.pack_page(), batch.skip() + batch.len())?;
    let checksums = &index.checksums[batch.first_chunk..];
    for ((chunk, part), expected) in batch.parts(pages).zip(checksums) {
        let crc = crc32c::crc32c(part);
        if crc != *expected {
            found.push(bad(
                batch,
                chunk,
                format!("checksum {crc:08x}, expected {expected:08x}"),
            ));
        }
    }
    Ok(())
}

/// As [`compare`], chunk by chunk, for a batch that cannot be read whole: adds those that cannot be read.
fn compare_singly(file: &DirectFile, batch: &Batch, index: &PackIndex, pages: &mut [u8], found: &mut Vec<BadChunk>) {
    for (number, chunk) in batch.chunks.iter().enumerate() {
        let single = Batch {
            range: batch.range,
            first_chunk: batch.first_chunk + number,
            chunks: vec![*chunk],
        };
        let pages = &mut pages[..single.span()];
        if let Err(error) = compare(file, &single, index, pages, found) {
            found.push(bad(&single, *chunk, error.to_string()));
        }
    }
}

fn bad(batch: &Batch, chunk: Chunk, reason: String) -> BadChunk {
    let range = &batch.range;
    BadChunk {
        expert: range.expert,
        extent: range.extent,
        start: chunk.start,
        len: chunk.len,
        offset: range.offset + (chunk.start - range.start),
        reason,
    }
}
