//! From the shards to int8, a block of rows at a time: one thread reads while the others convert what has landed.

use super::TrunkError;
use super::format::Entry;
use crate::error::Error;
use crate::generate::Cancel;
use checkpoint::{Checkpoint, TEXT_PREFIX};
use drives::{AlignedBuf, DEFAULT_DEPTH, DirectFile, Notices, PAGE_BYTES};
use std::io;
use std::sync::mpsc::{SyncSender, sync_channel};

/// Bytes of bf16 that are read and converted at once, unless a single row is longer. Four such blocks exist at most: one is read, one
/// waits, one is converted, and half a one is written.
const BLOCK_BYTES: usize = 16 << 20;
const BF16_BYTES: usize = 2;

/// What is converted, and with what.
pub(super) struct Conversion<'a> {
    pub(super) checkpoint: &'a Checkpoint,
    pub(super) notices: &'a Notices,
    pub(super) threads: usize,
    pub(super) cancel: &'a Cancel,
}

/// Takes bytes of the tensor at a place.
type Take<'a> = &'a mut dyn FnMut(usize, &[u8]) -> Result<(), Error>;

/// Rows of a tensor as published.
struct Block {
    /// Place of the tensor.
    place: usize,
    /// Number of the first row.
    first: usize,
    bytes: AlignedBuf,
}

impl Conversion<'_> {
    /// Bytes as published.
    pub(super) fn published_bytes(entries: &[Entry]) -> u64 {
        let bytes = |entry: &Entry| (entry.rows * entry.cols * BF16_BYTES) as u64;
        entries.iter().map(bytes).sum()
    }

    /// Converts tensors in their order and gives their bytes, piece by piece, to `take`, with the tensor's place among `entries`.
    /// `progress` is told the published bytes done. Returns the CRC-32C of each tensor.
    pub(super) fn run(
        &self,
        entries: &[Entry],
        progress: &mut dyn FnMut(u64),
        take: Take<'_>,
    ) -> Result<Vec<u32>, Error> {
        let (give, blocks) = sync_channel(1);
        std::thread::scope(|scope| {
            let reader = std::thread::Builder::new()
                .name("trunk reader".into())
                .spawn_scoped(scope, move || self.read_all(entries, &give))
                .map_err(|error| drives::Error::Thread {
                    reason: error.to_string(),
                })?;
            let mut crcs = vec![0; entries.len()];
            let mut done = 0;
            let mut scales: Vec<u8> = vec![];
            let mut integers = vec![];
            let mut convert = |block: Block| -> Result<(), Error> {
                self.cancel.check()?;
                let entry = &entries[block.place];
                let published = block.bytes.bytes();
                integers.resize(published.len() / BF16_BYTES, 0);
                self.quantize(entry, &block, &mut integers, &mut scales)?;
                let crc = &mut crcs[block.place];
                let mut pass_on = |bytes: &[u8]| {
                    *crc = crc32c::crc32c_append(*crc, bytes);
                    take(block.place, bytes)
                };
                pass_on(&integers)?;
                if block.first + integers.len() / entry.cols == entry.rows {
                    pass_on(&scales)?;
                    scales.clear();
                }
                done += published.len() as u64;
                progress(done);
                Ok(())
            };
            let mut outcome = Ok(());
            for block in &blocks {
                outcome = convert(block);
                if outcome.is_err() {
                    break;
                }
            }
            // A reader that waits to hand a block over must not wait for ever.
            drop(blocks);
            let read = match reader.join() {
                Ok(read) => read,
                Err(panic) => std::panic::resume_unwind(panic),
            };
            outcome.and(read).map(|()| crcs)
        })
    }

    /// Reads all tensors, block by block. Ends early when nobody takes them any more.
    fn read_all(&self, entries: &[Entry], give: &SyncSender<Block>) -> Result<(), Error> {
        let mut open: Option<(usize, DirectFile)> = None;
        for (place, entry) in entries.iter().enumerate() {
            let info = *self.checkpoint.tensor(&entry.name)?;
            let (shard, file) = match open.take() {
                Some((shard, file)) if shard == info.shard => (shard, file),
                _ => {
                    let path = &self.checkpoint.shards()[info.shard].path;
                    (info.shard, DirectFile::open(path, self.notices)?)
                }
            };
            let row_bytes = entry.cols * BF16_BYTES;
            let at_once = (BLOCK_BYTES / row_bytes).max(1);
            for first in (0..entry.rows).step_by(at_once) {
                let offset = info.offset + (first * row_bytes) as u64;
                let len = at_once.min(entry.rows - first) * row_bytes;
                let bytes = AlignedBuf::read_range(&file, offset, len, DEFAULT_DEPTH)?;
                if give.send(Block { place, first, bytes }).is_err() {
                    return Ok(());
                }
            }
            open = Some((shard, file));
        }
        Ok(())
    }

    /// Converts a block's rows on all threads. Scales are appended.
    fn quantize(&self, entry: &Entry, block: &Block, integers: &mut [u8], scales: &mut Vec<u8>) -> Result<(), Error> {
        let cols = entry.cols;
        let a_thread = (integers.len() / cols).div_ceil(self.threads.max(1));
        let rows = |published: &[u8], integers: &mut [u8]| -> Result<Vec<u8>, (usize, usize)> {
            let pairs = published
                .chunks_exact(cols * BF16_BYTES)
                .zip(integers.chunks_exact_mut(cols));
            let mut scales = Vec::with_capacity(4 * published.len() / (cols * BF16_BYTES));
            for (row, (published, integers)) in pairs.enumerate() {
                let scale = kernels::quantize_row(published, integers).map_err(|wrong| (row, wrong.column))?;
                scales.extend(scale.to_le_bytes());
            }
            Ok(scales)
        };
        let published = block.bytes.bytes().chunks(a_thread * cols * BF16_BYTES);
        let parts = published.zip(integers.chunks_mut(a_thread * cols));
        std::thread::scope(|scope| {
            let threads: Vec<_> = parts
                .map(|(published, integers)| scope.spawn(move || rows(published, integers)))
                .collect();
            for (part, thread) in threads.into_iter().enumerate() {
                let converted = match thread.join() {
                    Ok(converted) => converted,
                    Err(panic) => std::panic::resume_unwind(panic),
                };
                scales
                    .extend(converted.map_err(|(row, column)| {
                        self.not_finite(entry, block.first + part * a_thread + row, column)
                    })?);
            }
            Ok(())
        })
    }

    fn not_finite(&self, entry: &Entry, row: usize, column: usize) -> Error {
        let shard = self.checkpoint.tensor(&entry.name).map(|info| info.shard);
        let path = shard.map(|shard| self.checkpoint.shards()[shard].path.clone());
        TrunkError::NotFinite {
            path: path.unwrap_or_else(|_| self.checkpoint.dir().to_path_buf()),
            tensor: format!("{TEXT_PREFIX}{}", entry.name),
            row,
            column,
        }
        .into()
    }
}

/// Gathers bytes into whole pages and writes them one after the other.
pub(super) struct Pages<'a> {
    write: &'a mut dyn FnMut(&[u8], u64) -> io::Result<()>,
    buffer: AlignedBuf,
    filled: usize,
    /// Where the buffer's first byte goes.
    offset: u64,
}

impl<'a> Pages<'a> {
    /// Begins at `offset`, a page border.
    pub(super) fn new(offset: u64, write: &'a mut dyn FnMut(&[u8], u64) -> io::Result<()>) -> Result<Self, Error> {
        const { assert!(BLOCK_BYTES.is_multiple_of(2 * PAGE_BYTES)) };
        Ok(Self {
            write,
            buffer: AlignedBuf::zeroed(BLOCK_BYTES / 2)?,
            filled: 0,
            offset,
        })
    }

    /// Adds bytes that belong at `offset` or, if those before them end behind it, there. What lies between is zeros.
    pub(super) fn add_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let gap = offset.saturating_sub(self.offset + self.filled as u64);
        debug_assert!(gap < PAGE_BYTES as u64);
        self.add(&[0; PAGE_BYTES][..gap as usize])?;
        self.add(bytes)
    }

    fn add(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let room = &mut self.buffer.bytes_mut()[self.filled..];
            let (now, later) = bytes.split_at(bytes.len().min(room.len()));
            room[..now.len()].copy_from_slice(now);
            self.filled += now.len();
            bytes = later;
            if self.filled == self.buffer.bytes().len() {
                self.flush()?;
            }
        }
        Ok(())
    }

    /// Writes what is left, filled up with zeros to whole pages.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        let whole = self.filled.next_multiple_of(PAGE_BYTES);
        self.buffer.bytes_mut()[self.filled..whole].fill(0);
        if whole > 0 {
            (self.write)(&self.buffer.bytes()[..whole], self.offset)?;
        }
        self.offset += whole as u64;
        self.filled = 0;
        Ok(())
    }
}
