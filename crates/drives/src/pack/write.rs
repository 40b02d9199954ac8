//! Writing a pack: read the shards, checksum, write, read back, rename.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use super::partial::{PartialFile, Target};
use super::{BATCH_BYTES, Batch, PackContents, PackError, PackIndex, batches, format, verify};
use crate::error::{Error, ReadError};
use crate::file::DirectFile;
use crate::map::AlignedMap;
use crate::notice::Notices;

/// Buffers between reading and writing, of [`BATCH_BYTES`] each: one is read, one is written, one waits.
const BUFFERS: usize = 3;

/// What is being done to a pack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PackPhase {
    /// Its data is copied.
    Write,
    /// Its data is read and compared with the checksums.
    Verify,
}

/// How far a pack is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackProgress {
    /// What is being done.
    pub phase: PackPhase,
    /// Bytes of experts done.
    pub bytes: u64,
    /// Bytes of experts in the pack.
    pub total: u64,
}

/// Writes a pack to `path` and returns its index. `sources` are the shards to read, as [`PackContents::shards`] lists them.
///
/// The file is written under another name, made durable, read back and compared with the checksums, and then renamed. It
/// is removed when something fails or when `progress` breaks.
///
/// # Errors
///
/// [`PackError::NoSpace`] when the drive is full, [`PackError::Busy`], [`PackError::Stopped`], [`PackError::Read`] when a shard cannot be
/// read, [`PackError::Damaged`] when the drive does not give back what it was given, [`PackError::Io`].
pub fn write_pack(
    path: &Path,
    contents: &PackContents,
    sources: &[PathBuf],
    notices: &Notices,
    progress: &mut dyn FnMut(PackProgress) -> ControlFlow<()>,
) -> Result<PackIndex, PackError> {
    let partial = PartialFile::create(path, contents.file_len)?;
    let checksums = fill(&partial, &partial, contents, sources, notices, progress)?;
    partial.sync()?;
    let written = PackIndex::open(partial.path(), notices)?;
    if (&written.contents, &written.checksums) != (contents, &checksums) {
        return Err(PackError::malformed(path, "another index than was written", "the same"));
    }
    verify::expect_sound(&written, path, notices, progress)?;
    partial.complete()?;
    Ok(PackIndex {
        path: path.to_path_buf(),
        ..written
    })
}

/// Pages on their way from a shard to the pack.
struct Load {
    memory: AlignedMap,
    span: usize,
    offset: u64,
    bytes: u64,
}

impl Load {
    fn pages(&mut self) -> &mut [u8] {
        &mut self.memory.map[self.memory.start..][..self.span]
    }
}

/// Writes data, index and header, in this order, and returns the checksums. One thread reads while this one writes.
fn fill(
    target: &dyn Target,
    partial: &PartialFile,
    contents: &PackContents,
    sources: &[PathBuf],
    notices: &Notices,
    progress: &mut dyn FnMut(PackProgress) -> ControlFlow<()>,
) -> Result<Vec<u32>, PackError> {
    let total = contents.expert_bytes();
    let (give, empty) = sync_channel(BUFFERS);
    let (filled, take) = sync_channel(BUFFERS);
    for _ in 0..BUFFERS {
        // The channel has room for all buffers there are, so sending never waits.
        let _ = give.send(AlignedMap::new(BATCH_BYTES)?);
    }
    let checksums = std::thread::scope(|scope| {
        let reader = std::thread::Builder::new()
            .name("pack reader".into())
            .spawn_scoped(scope, move || read_all(contents, sources, notices, &empty, &filled))
            .map_err(|error| Error::Thread {
                reason: error.to_string(),
            })?;
        let mut outcome = Ok(());
        let mut bytes = 0;
        for mut load in &take {
            let offset = load.offset;
            let written = target.write_pages(load.pages(), offset);
            outcome = written.map_err(|error| partial.write_error(&error, contents.file_len));
            bytes += load.bytes;
            let at = PackProgress {
                phase: PackPhase::Write,
                bytes,
                total,
            };
            if outcome.is_ok() && progress(at).is_break() {
                outcome = Err(PackError::Stopped {
                    path: partial.path().to_path_buf(),
                });
            }
            if outcome.is_err() {
                break;
            }
            let _ = give.send(load.memory);
        }
        // A reader that waits for a buffer, or to hand one over, must not wait for ever.
        drop((give, take));
        let read = match reader.join() {
            Ok(read) => read,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        outcome.and(read)
    })?;
    let head = format::encode(contents, &checksums);
    let mut memory = AlignedMap::new(head.len())?;
    let pages = &mut memory.map[memory.start..][..head.len()];
    pages.copy_from_slice(&head);
    let written = target.write_pages(pages, 0);
    written.map_err(|error| partial.write_error(&error, contents.file_len))?;
    Ok(checksums)
}

/// Reads all batches, in order, into buffers from `empty`, and returns the checksums. Ends early when nobody takes them any more.
fn read_all(
    contents: &PackContents,
    sources: &[PathBuf],
    notices: &Notices,
    empty: &Receiver<AlignedMap>,
    filled: &SyncSender<Load>,
) -> Result<Vec<u32>, PackError> {
    let mut checksums = Vec::with_capacity(contents.chunk_total());
    let mut open: Option<(u32, DirectFile)> = None;
    for batch in batches(contents) {
        let shard = batch.range.shard;
        let file = match open.take() {
            Some((of, file)) if of == shard => file,
            _ => open_source(sources, shard, notices)?,
        };
        let Ok(memory) = empty.recv() else { break };
        let mut load = Load {
            memory,
            span: batch.span(),
            offset: batch.pack_page(),
            bytes: batch.len() as u64,
        };
        read_batch(&file, &batch, load.pages()).map_err(Error::Read)?;
        checksums.extend(batch.parts(load.pages()).map(|(_, part)| crc32c::crc32c(part)));
        if filled.send(load).is_err() {
            break;
        }
        open = Some((shard, file));
    }
    Ok(checksums)
}

fn open_source(sources: &[PathBuf], shard: u32, notices: &Notices) -> Result<DirectFile, PackError> {
    let path = sources.get(shard as usize).ok_or_else(|| PackError::Contents {
        problem: format!("shard {shard} has no source, expected one of {}", sources.len()),
    })?;
    Ok(DirectFile::open(path, notices)?)
}

/// Reads a batch from its shard; what lies around it in its pages becomes zero.
fn read_batch(shard: &DirectFile, batch: &Batch, pages: &mut [u8]) -> Result<(), ReadError> {
    let (skip, end) = (batch.skip(), batch.skip() + batch.len());
    shard.read_exact_at(pages, batch.shard_page(), end)?;
    pages[..skip].fill(0);
    pages[end..].fill(0);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::tests::{noise, small_contents};
    use super::*;
    use std::io;
    use std::sync::atomic::{AtomicU64, Ordering};

    /// A file on a disk that is full after some pages.
    struct Full<'a> {
        file: &'a PartialFile,
        left: AtomicU64,
    }

    impl Target for Full<'_> {
        fn write_pages(&self, pages: &[u8], offset: u64) -> io::Result<()> {
            let len = pages.len() as u64;
            let room = self
                .left
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(len));
            room.map_err(|_| io::Error::from(io::ErrorKind::StorageFull))?;
            self.file.write_pages(pages, offset)
        }
    }

    #[test]
    fn a_disk_that_fills_up_leaves_nothing_and_says_both_numbers() {
        let folder = tempfile::tempdir().unwrap();
        let shard = folder.path().join("shard");
        std::fs::write(&shard, noise(200_000)).unwrap();
        let contents = small_contents(&shard);
        let target = folder.path().join("a.pack");
        // Room for nothing, for some of the data, and for all but the head.
        let all = contents.file_len - contents.data_offset;
        for room in [0, 40_960, all] {
            let partial = PartialFile::create(&target, contents.file_len).unwrap();
            assert!(partial.path().exists());
            let full = Full {
                file: &partial,
                left: AtomicU64::new(room),
            };
            let sources = [shard.clone()];
            let mut go_on = |_| ControlFlow::Continue(());
            let error = fill(&full, &partial, &contents, &sources, &Notices::default(), &mut go_on).unwrap_err();
            let PackError::NoSpace { needed, free, .. } = error else {
                panic!("{error}");
            };
            assert_eq!(needed, contents.file_len);
            assert!(free > 0);
            drop(partial);
            assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "the shard alone");
        }
        // With room for all it is the pack.
        let partial = PartialFile::create(&target, contents.file_len).unwrap();
        let full = Full {
            file: &partial,
            left: AtomicU64::new(contents.file_len),
        };
        let mut go_on = |_| ControlFlow::Continue(());
        fill(&full, &partial, &contents, &[shard], &Notices::default(), &mut go_on).unwrap();
        assert_eq!(full.left.into_inner(), 0);
    }

    #[test]
    fn only_one_process_writes_a_pack() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("a.pack");
        let first = PartialFile::create(&target, 8192).unwrap();
        assert!(matches!(
            PartialFile::create(&target, 8192),
            Err(PackError::Busy { .. })
        ));
        super::super::sweep_partials(folder.path()).unwrap();
        assert!(first.path().exists(), "still being written");
        let path = first.path().to_path_buf();
        drop(first);
        assert!(!path.exists());
        std::fs::write(&path, "left behind by a killed process").unwrap();
        let other = folder.path().join("not.a.pack.partial.txt");
        std::fs::write(&other, "").unwrap();
        super::super::sweep_partials(folder.path()).unwrap();
        assert!(!path.exists() && other.exists());
    }
}
