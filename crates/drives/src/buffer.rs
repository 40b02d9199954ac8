//! Any byte range of a file in memory of its own, without a copy.

use std::fmt;
use std::sync::{Mutex, PoisonError};

use crate::error::{Error, ReadError, Result};
use crate::file::DirectFile;
use crate::map::{AlignedMap, HugePages};
use crate::page::{PAGE_BYTES, in_page, page_ceil};

/// Size of one read of [`AlignedBuf::read_range`] in bytes, a multiple of the page size.
pub const READ_PIECE_BYTES: usize = 8 << 20;

/// What the bytes of an [`AlignedBuf`] are aligned to: a cache line.
pub const LINE_BYTES: usize = 64;

/// A byte range of a file, read directly into memory of its own. The memory is freed on drop.
///
/// The range need not be aligned: the read is widened to whole pages. [`bytes`](Self::bytes) shows the range, moved to the start of a
/// cache line.
pub struct AlignedBuf {
    memory: AlignedMap,
    skip: usize,
    len: usize,
}

impl AlignedBuf {
    /// Reads `len` bytes at `offset`, in pieces of [`READ_PIECE_BYTES`] on up to `threads` threads.
    ///
    /// # Errors
    ///
    /// [`Error::Read`] when the range reaches beyond the file, before memory is taken, or when a read fails; [`Error::Map`] when
    /// there is no memory; [`Error::Thread`] when a thread cannot start.
    pub fn read_range(file: &DirectFile, offset: u64, len: usize, threads: usize) -> Result<AlignedBuf> {
        let available = file.len().saturating_sub(offset);
        if available < len as u64 {
            return Err(Error::Read(ReadError {
                path: file.path().to_path_buf(),
                offset,
                wanted: len as u64,
                got: available,
                errno: None,
            }));
        }
        let skip = in_page(offset) as usize;
        let first = offset - skip as u64;
        let wanted = skip + len;
        let span = page_ceil(wanted as u64).unwrap_or(u64::MAX) as usize;
        let mut memory = AlignedMap::new(span.max(PAGE_BYTES))?;
        let target = &mut memory.map[memory.start..][..span];

        let pieces = Mutex::new(target.chunks_mut(READ_PIECE_BYTES).enumerate());
        let next = || pieces.lock().unwrap_or_else(PoisonError::into_inner).next();
        let read_pieces = || -> std::result::Result<(), ReadError> {
            while let Some((index, piece)) = next() {
                let start = index * READ_PIECE_BYTES;
                let wanted = piece.len().min(wanted - start);
                file.read_exact_at(piece, first + start as u64, wanted)?;
            }
            Ok(())
        };
        let helpers = threads.min(span.div_ceil(READ_PIECE_BYTES)).saturating_sub(1);
        std::thread::scope(|scope| {
            let started: Vec<_> = (0..helpers)
                .map(|_| std::thread::Builder::new().spawn_scoped(scope, read_pieces))
                .collect();
            let mut outcome = read_pieces().map_err(Error::Read);
            for thread in started {
                let ended = match thread {
                    Ok(thread) => match thread.join() {
                        Ok(read) => read.map_err(Error::Read),
                        Err(panic) => std::panic::resume_unwind(panic),
                    },
                    Err(error) => Err(Error::Thread {
                        reason: error.to_string(),
                    }),
                };
                outcome = outcome.and(ended);
            }
            outcome
        })?;
        // Kernels read cache lines: the bytes go down to the start of one, if they are not there.
        let line = skip - skip % LINE_BYTES;
        if line < skip {
            target.copy_within(skip..skip + len, line);
        }
        Ok(Self {
            memory,
            skip: line,
            len,
        })
    }

    /// `len` zeros, which begin on a page border: what is to be written by pages.
    ///
    /// # Errors
    ///
    /// [`Error::Map`] when there is no memory.
    pub fn zeroed(len: usize) -> Result<AlignedBuf> {
        let memory = AlignedMap::new(len.max(PAGE_BYTES))?;
        Ok(Self { memory, skip: 0, len })
    }

    /// The same bytes as [`bytes`](Self::bytes), to be changed.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory.map[self.memory.start + self.skip..][..self.len]
    }

    /// Exactly the bytes of the range.
    pub fn bytes(&self) -> &[u8] {
        &self.memory.map[self.memory.start + self.skip..][..self.len]
    }

    /// Bytes of memory that the buffer occupies: the range widened to whole pages.
    pub fn memory_bytes(&self) -> usize {
        page_ceil((self.skip + self.len) as u64).unwrap_or(u64::MAX) as usize
    }

    /// Whether the memory asks for huge pages.
    pub fn huge_pages(&self) -> &HugePages {
        &self.memory.huge
    }
}

impl fmt::Debug for AlignedBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AlignedBuf")
            .field("len", &self.len)
            .field("skip", &self.skip)
            .field("huge", &self.memory.huge)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::notice::Notices;
    use proptest::prelude::*;
    use std::io::Write;

    fn file_of(bytes: &[u8]) -> (tempfile::NamedTempFile, DirectFile) {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(bytes).unwrap();
        let direct = DirectFile::open(file.path(), &Notices::default()).unwrap();
        (file, direct)
    }

    fn noise(len: usize) -> Vec<u8> {
        let mut state = 1u64;
        (0..len)
            .map(|_| {
                state = state
                    .wrapping_mul(6364136223846793005)
                    .wrapping_add(1442695040888963407);
                (state >> 56) as u8
            })
            .collect()
    }

    #[test]
    fn any_range_is_exact() {
        let source = noise(5 * PAGE_BYTES + 1234);
        let (_keep, file) = file_of(&source);
        proptest!(ProptestConfig::with_cases(200), |(a in 0..=source.len(), b in 0..=source.len())| {
            let (from, to) = (a.min(b), a.max(b));
            let buf = AlignedBuf::read_range(&file, from as u64, to - from, 1).unwrap();
            prop_assert_eq!(buf.bytes(), &source[from..to]);
            prop_assert_eq!(buf.bytes().as_ptr() as usize % LINE_BYTES, 0);
        });
    }

    #[test]
    fn pieces_on_several_threads_join_up() {
        let source = noise(2 * READ_PIECE_BYTES + 3 * PAGE_BYTES + 17);
        let (_keep, file) = file_of(&source);
        for threads in [0, 1, 2, 9] {
            let buf = AlignedBuf::read_range(&file, 4095, source.len() - 4095, threads).unwrap();
            assert!(buf.bytes() == &source[4095..], "{threads} threads");
        }
    }

    #[test]
    fn a_range_beyond_the_file_is_refused_before_memory_is_taken() {
        let (_keep, file) = file_of(&noise(100));
        let error = AlignedBuf::read_range(&file, 40, 1 << 60, 1).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("at offset 40, got 60: end of file"), "{text}");
        assert!(AlignedBuf::read_range(&file, u64::MAX, 1, 1).is_err());
    }
}
