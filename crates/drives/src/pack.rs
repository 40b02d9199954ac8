//! Packs: files that hold chosen ranges of chosen experts, each at its published offset mod 4096, with a checksum for every chunk.
//!
//! The format is drawn in `docs/layout.md`.

use std::cmp::Ordering;
use std::path::{Path, PathBuf};

use crate::layout::{ExpertId, FileId, Home};
use crate::page::{PAGE_BYTES, in_page, page_ceil, page_floor};

mod error;
mod format;
mod identity;
mod partial;
mod verify;
mod write;

pub use error::PackError;
pub use format::{
    CHECKSUM_CHUNK_BYTES, MAX_CHECKSUM_CHUNK_BYTES, MAX_INDEX_BYTES, MAX_NAME_BYTES, PACK_SUFFIX, PARTIAL_SUFFIX,
};
pub use identity::{FileIdentity, SAMPLES};
pub use partial::{PartialFile, free_bytes, sweep_partials};
pub use verify::{BadChunk, PackReport, verify_pack};
pub use write::{PackPhase, PackProgress, write_pack};

/// A shard that a pack took bytes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackShard {
    /// Its file name.
    pub name: String,
    /// What it was when the pack was made.
    pub identity: FileIdentity,
}

/// A range of an expert's extent that a pack holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackRange {
    /// The expert.
    pub expert: ExpertId,
    /// Which of its extents.
    pub extent: u32,
    /// The shard that the extent is published in: a place in [`PackContents::shards`].
    pub shard: u32,
    /// First byte of the extent in the shard.
    pub extent_offset: u64,
    /// Bytes of the extent.
    pub extent_len: u64,
    /// First byte of the range, counted from the extent's start.
    pub start: u64,
    /// Bytes of the range.
    pub len: u64,
    /// First byte of the range in the pack; [`PackContents::new`] sets it.
    pub offset: u64,
}

impl PackRange {
    /// The range as a home in `file`, the pack.
    pub fn home(&self, file: FileId) -> Home {
        Home {
            file,
            offset: self.offset,
            start: self.start,
            len: self.len,
        }
    }

    fn end(&self) -> u64 {
        self.start + self.len
    }

    /// Position in the extent's pages of byte `byte` of the extent.
    fn in_window(&self, byte: u64) -> u64 {
        in_page(self.extent_offset) + byte
    }

    /// Numbers of the first and the last chunk that the range touches.
    fn cells(&self, chunk_bytes: u32) -> (u64, u64) {
        let chunk = u64::from(chunk_bytes);
        (
            self.in_window(self.start) / chunk,
            self.in_window(self.end() - 1) / chunk,
        )
    }

    /// The range's chunks, in order.
    fn chunks(&self, chunk_bytes: u32) -> impl Iterator<Item = Chunk> + use<> {
        let (first, last) = self.cells(chunk_bytes);
        let (range, chunk) = (*self, u64::from(chunk_bytes));
        (first..=last).map(move |cell| {
            let border = |cell: u64| (cell * chunk).saturating_sub(in_page(range.extent_offset));
            let start = border(cell).max(range.start);
            let end = border(cell + 1).min(range.end());
            Chunk {
                start,
                len: end - start,
            }
        })
    }

    fn chunk_count(&self, chunk_bytes: u32) -> usize {
        let (first, last) = self.cells(chunk_bytes);
        (last - first + 1) as usize
    }

    /// Bytes of the whole pages that the range touches.
    fn device_bytes(&self) -> u64 {
        page_ceil(in_page(self.offset_in_shard()) + self.len).unwrap_or(u64::MAX)
    }

    fn offset_in_shard(&self) -> u64 {
        self.extent_offset + self.start
    }
}

/// What one checksum covers, in bytes from the extent's start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Chunk {
    start: u64,
    len: u64,
}

/// What a pack holds, or shall hold: checked, sorted, with a place in the file for each range.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackContents {
    chunk_bytes: u32,
    shards: Vec<PackShard>,
    ranges: Vec<PackRange>,
    data_offset: u64,
    file_len: u64,
    /// Place of each range's first checksum, and the number of all.
    first_chunk: Vec<usize>,
}

impl PackContents {
    /// Sorts `ranges` and gives each its place. Every byte of `chunk_bytes`, a multiple of the page size, gets one checksum.
    ///
    /// # Errors
    ///
    /// [`PackError::Contents`] names the first range that is empty, reaches beyond its extent, has a border inside a page or overlaps
    /// another one, and limits that are passed.
    pub fn new(chunk_bytes: u32, shards: Vec<PackShard>, mut ranges: Vec<PackRange>) -> Result<Self, PackError> {
        ranges.sort_by_key(|range| (range.expert, range.extent, range.start));
        check_contents(chunk_bytes, &shards, &ranges).map_err(|problem| PackError::Contents { problem })?;
        let mut contents = Self::placed(chunk_bytes, shards, ranges);
        let mut next = contents.data_offset;
        for range in &mut contents.ranges {
            range.offset = next + in_page(range.offset_in_shard());
            next += range.device_bytes();
        }
        contents.file_len = next;
        Ok(contents)
    }

    /// With the ranges' offsets as they are.
    fn placed(chunk_bytes: u32, shards: Vec<PackShard>, ranges: Vec<PackRange>) -> Self {
        let mut first_chunk = vec![0];
        let mut chunks = 0;
        for range in &ranges {
            chunks += range.chunk_count(chunk_bytes);
            first_chunk.push(chunks);
        }
        let data_offset = format::data_offset(format::index_bytes(&shards, ranges.len(), chunks));
        Self {
            chunk_bytes,
            shards,
            ranges,
            data_offset,
            file_len: 0,
            first_chunk,
        }
    }

    /// Bytes of a checksum chunk.
    pub fn chunk_bytes(&self) -> u32 {
        self.chunk_bytes
    }

    /// The shards that bytes come from.
    pub fn shards(&self) -> &[PackShard] {
        &self.shards
    }

    /// The ranges, ascending by expert, extent and start.
    pub fn ranges(&self) -> &[PackRange] {
        &self.ranges
    }

    /// Length of the file in bytes.
    pub fn file_len(&self) -> u64 {
        self.file_len
    }

    /// Bytes of experts.
    pub fn expert_bytes(&self) -> u64 {
        self.ranges.iter().map(|range| range.len).sum()
    }

    /// A number that depends on all that the pack holds: part of its file name.
    pub fn fingerprint(&self) -> u32 {
        format::fingerprint(self)
    }

    fn chunk_total(&self) -> usize {
        self.first_chunk.last().copied().unwrap_or(0)
    }
}

/// What is wrong with ranges that are sorted; their offsets are not looked at.
fn check_contents(chunk_bytes: u32, shards: &[PackShard], ranges: &[PackRange]) -> Result<(), String> {
    let chunk = chunk_bytes as usize;
    if chunk == 0 || !chunk.is_multiple_of(PAGE_BYTES) || chunk > MAX_CHECKSUM_CHUNK_BYTES as usize {
        return Err(format!(
            "checksum chunks of {chunk} bytes, expected a positive multiple of {PAGE_BYTES} up to {MAX_CHECKSUM_CHUNK_BYTES}"
        ));
    }
    if ranges.is_empty() {
        return Err("no range, expected at least one".into());
    }
    if let Some(shard) = shards.iter().find(|shard| !is_plain_name(&shard.name)) {
        return Err(format!(
            "a shard named {:?}, expected a file name of at most {MAX_NAME_BYTES} bytes",
            shard.name
        ));
    }
    let mut chunks = 0u64;
    for (place, range) in ranges.iter().enumerate() {
        check_range(range, shards.len()).map_err(|problem| name_range(range, &problem))?;
        let (first, last) = range.cells(chunk_bytes);
        chunks += last - first + 1;
        if let Some(before) = place.checked_sub(1).map(|before| &ranges[before]) {
            check_neighbours(before, range).map_err(|problem| name_range(range, &problem))?;
        }
    }
    let index = format::index_bytes(shards, ranges.len(), usize::try_from(chunks).unwrap_or(usize::MAX));
    if index > MAX_INDEX_BYTES {
        return Err(format!("an index of {index} bytes, expected at most {MAX_INDEX_BYTES}"));
    }
    Ok(())
}

fn name_range(range: &PackRange, problem: &str) -> String {
    format!("expert {} extent {}: {problem}", range.expert, range.extent)
}

fn check_range(range: &PackRange, shards: usize) -> Result<(), String> {
    let (start, len, whole) = (range.start, range.len, range.extent_len);
    if range.shard as usize >= shards {
        return Err(format!("shard {}, expected one of {shards}", range.shard));
    }
    let end = start.checked_add(len).filter(|&end| len > 0 && end <= whole);
    let in_file = range.extent_offset.checked_add(whole).and_then(page_ceil).is_some();
    let Some(end) = end.filter(|_| in_file && whole <= MAX_EXTENT_BYTES) else {
        return Err(format!(
            "{len} bytes from byte {start}, expected at least 1 inside an extent of {whole}"
        ));
    };
    let on_page = |byte: u64| in_page(range.in_window(byte)) == 0;
    if (start == 0 || on_page(start)) && (end == whole || on_page(end)) {
        Ok(())
    } else {
        Err(format!(
            "bytes {start}..{end}, expected borders on pages of the shard or ends of the extent"
        ))
    }
}

/// Largest extent in bytes: an expert's slot is measured in 32 bits.
const MAX_EXTENT_BYTES: u64 = u32::MAX as u64;

fn check_neighbours(before: &PackRange, range: &PackRange) -> Result<(), String> {
    let key = |range: &PackRange| (range.expert, range.extent);
    match key(before).cmp(&key(range)) {
        Ordering::Less => Ok(()),
        Ordering::Greater => Err("found behind a later one, expected ascending order".into()),
        Ordering::Equal if before.end() > range.start => Err(format!(
            "bytes {}..{} are there twice, expected once",
            range.start,
            before.end().min(range.end())
        )),
        Ordering::Equal => {
            let extent = |range: &PackRange| (range.shard, range.extent_offset, range.extent_len);
            if extent(before) == extent(range) {
                Ok(())
            } else {
                Err("two ranges place it differently, expected one shard, offset and length".into())
            }
        }
    }
}

/// Whether a name stays inside its folder.
fn is_plain_name(name: &str) -> bool {
    !matches!(name, "" | "." | "..") && !name.contains(['/', '\\', '\0']) && name.len() <= MAX_NAME_BYTES
}

/// The index of a pack: what it holds and the checksums, not the data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackIndex {
    path: PathBuf,
    contents: PackContents,
    checksums: Vec<u32>,
}

impl PackIndex {
    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What it holds.
    pub fn contents(&self) -> &PackContents {
        &self.contents
    }

    /// Compares bytes of an expert's extent, from byte `start` of it on, with the checksums of all chunks that lie in them entirely.
    ///
    /// The bytes may come from any home: checksums cover published bytes alone. Returns how many bytes were compared, at most all.
    ///
    /// # Errors
    ///
    /// [`PackError::Damaged`] for the first chunk that differs.
    pub fn check(&self, expert: ExpertId, extent: u32, start: u64, bytes: &[u8]) -> Result<u64, PackError> {
        let ranges = &self.contents.ranges;
        let key = |range: &PackRange| (range.expert, range.extent);
        let first = ranges.partition_point(|range| key(range) < (expert, extent));
        let mut compared = 0;
        for (place, range) in ranges.iter().enumerate().skip(first) {
            if key(range) != (expert, extent) {
                break;
            }
            let checksums = &self.checksums[self.contents.first_chunk[place]..];
            for (chunk, &expected) in range.chunks(self.contents.chunk_bytes).zip(checksums) {
                let inside = chunk.start.checked_sub(start).and_then(|from| {
                    let from = usize::try_from(from).ok()?;
                    bytes.get(from..from.checked_add(chunk.len as usize)?)
                });
                let Some(part) = inside else { continue };
                let found = crc32c::crc32c(part);
                if found != expected {
                    return Err(PackError::Damaged {
                        path: self.path.clone(),
                        expert,
                        extent,
                        start: chunk.start,
                        len: chunk.len,
                        found,
                        expected,
                    });
                }
                compared += chunk.len;
            }
        }
        Ok(compared)
    }
}

/// Chunks of one range that are read at once.
struct Batch {
    range: PackRange,
    /// Place of the first one's checksum.
    first_chunk: usize,
    chunks: Vec<Chunk>,
}

/// Most bytes of pages that a batch covers.
const BATCH_BYTES: usize = 8 << 20;
const _: () = assert!(BATCH_BYTES >= MAX_CHECKSUM_CHUNK_BYTES as usize && BATCH_BYTES.is_multiple_of(PAGE_BYTES));

impl Batch {
    fn start(&self) -> u64 {
        self.chunks[0].start
    }

    fn len(&self) -> usize {
        self.chunks.iter().map(|chunk| chunk.len).sum::<u64>() as usize
    }

    /// Bytes of the first page in front of the batch's own.
    fn skip(&self) -> usize {
        in_page(self.range.extent_offset + self.start()) as usize
    }

    /// Bytes of whole pages.
    fn span(&self) -> usize {
        (self.skip() + self.len()).next_multiple_of(PAGE_BYTES)
    }

    /// Page in the shard at which the batch begins.
    fn shard_page(&self) -> u64 {
        page_floor(self.range.extent_offset + self.start())
    }

    /// Page in the pack at which the batch begins.
    fn pack_page(&self) -> u64 {
        page_floor(self.range.offset + (self.start() - self.range.start))
    }

    /// The chunks' bytes in `pages`, the batch's pages.
    fn parts<'a>(&'a self, pages: &'a [u8]) -> impl Iterator<Item = (Chunk, &'a [u8])> {
        let from = |chunk: &Chunk| self.skip() + (chunk.start - self.start()) as usize;
        self.chunks
            .iter()
            .map(move |chunk| (*chunk, &pages[from(chunk)..][..chunk.len as usize]))
    }
}

/// All chunks of a pack, in the order of its data.
fn batches(contents: &PackContents) -> impl Iterator<Item = Batch> {
    let chunk_bytes = contents.chunk_bytes;
    let at_once = BATCH_BYTES / chunk_bytes as usize;
    contents.ranges.iter().enumerate().flat_map(move |(place, range)| {
        let first = contents.first_chunk[place];
        let chunks: Vec<Chunk> = range.chunks(chunk_bytes).collect();
        let batches: Vec<Batch> = chunks
            .chunks(at_once)
            .enumerate()
            .map(|(number, chunks)| Batch {
                range: *range,
                first_chunk: first + number * at_once,
                chunks: chunks.to_vec(),
            })
            .collect();
        batches
    })
}

#[cfg(test)]
mod tests;
