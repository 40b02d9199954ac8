//! What can go wrong. Every message is one line: where, what was found, what was expected, what to do.

use std::fmt;
use std::io;
use std::path::PathBuf;

use rustix::io::Errno;

use crate::layout::ExpertId;

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;

/// Any failure of this crate.
///
/// It can be cloned, because a failed barrier gives its reason each time it is asked.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file or folder could not be opened or examined.
    #[error("{}: cannot open: {reason}; check that the path exists and that you may read it", path.display())]
    Open {
        /// The file or folder.
        path: PathBuf,
        /// The operating system's reason.
        reason: String,
    },
    /// A read outside a barrier failed.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// A read of an expert failed, and with it the barrier that waited for it.
    #[error("expert {expert} on drive {drive}: {read}")]
    Expert {
        /// The expert that could not be read.
        expert: ExpertId,
        /// The drive's name: its first folder.
        drive: String,
        /// The read that failed.
        read: ReadError,
    },
    /// The layout contradicts itself or the files.
    #[error("expert {expert}: {problem}; check that the files are complete and belong to one checkpoint")]
    Layout {
        /// The expert whose homes are wrong.
        expert: ExpertId,
        /// What was found and what was expected.
        problem: String,
    },
    /// The layout holds no expert at all.
    #[error("the layout holds no expert, expected at least one; give the folder of a mixture-of-experts checkpoint")]
    EmptyLayout,
    /// Memory for reads could not be mapped.
    #[error("cannot map {bytes} bytes for reads: {reason}; lower the memory budget or free memory")]
    Map {
        /// Bytes asked for.
        bytes: usize,
        /// The operating system's reason.
        reason: String,
    },
    /// The arena cannot hold one expert.
    #[error(
        "the arena has {arena_bytes} bytes in slots of {slot_bytes}, but an expert needs a slot of {needed}; give the arena at least {needed} bytes"
    )]
    ArenaTooSmall {
        /// Size of the arena.
        arena_bytes: usize,
        /// Size of its slots.
        slot_bytes: usize,
        /// Slot size that the largest expert needs.
        needed: usize,
    },
    /// The cache leaves no slot for experts on their way.
    #[error(
        "a cache of {cache_slots} slots in an arena of {slots}, expected at least one slot more; make the cache smaller"
    )]
    CacheTooLarge {
        /// Slots that the cache may keep.
        cache_slots: usize,
        /// Slots of the arena.
        slots: usize,
    },
    /// The arena serves another streamer.
    #[error(
        "the arena serves another streamer, expected it to be free; drop that streamer first or make a second arena"
    )]
    ArenaInUse,
    /// The chunk size is not a positive multiple of the page size.
    #[error(
        "chunks of {found} bytes: expected a positive multiple of {} up to {}; use the default of {}",
        crate::PAGE_BYTES,
        u32::MAX,
        crate::CHUNK_BYTES
    )]
    ChunkSize {
        /// The size that was asked for.
        found: usize,
    },
    /// The smallest piece is not a positive multiple of the page size.
    #[error(
        "pieces of at least {found} bytes: expected a positive multiple of {}; use the default of {}",
        crate::PAGE_BYTES,
        crate::FLOOR_BYTES
    )]
    FloorSize {
        /// The size that was asked for.
        found: usize,
    },
    /// The layout has more drives than a streamer serves.
    #[error(
        "the layout has {found} drives, expected at most {}; join folders into fewer drives",
        crate::MAX_DRIVES
    )]
    TooManyDrives {
        /// Drives of the layout.
        found: usize,
    },
    /// A demand names an expert that the layout lacks.
    #[error("expert {0} is in no file of the layout; check that the layout was built from this model")]
    UnknownExpert(ExpertId),
    /// A demand names an expert twice.
    #[error("expert {0} is demanded twice by one barrier, expected once; pass the union of the rows' routes")]
    DemandedTwice(ExpertId),
    /// No read can start because every slot is held, and none came back while the streamer waited.
    #[error(
        "all {slots} slots are held ({leased} by leases, {unread} by experts of other barriers), so no read can start; drop leases before asking for more, and take barriers in the order of their demands"
    )]
    Stalled {
        /// Slots of the arena.
        slots: usize,
        /// Slots that the caller holds as leases.
        leased: usize,
        /// Slots with landed experts that were not taken yet.
        unread: usize,
    },
    /// The thread that issues reads has ended.
    #[error(
        "the reader has stopped, expected it to run until the streamer is dropped; restart the program and report the messages before this one"
    )]
    Stopped,
    /// The kernel does not serve reads through io_uring.
    #[error(
        "io_uring is not available: {reason}; read with threads instead, or allow it (kernel 5.6 or later, sysctl kernel.io_uring_disabled=0, a container profile that permits it)"
    )]
    Uring {
        /// What was refused and why.
        reason: String,
    },
    /// A thread could not be started.
    #[error("cannot start a reader thread: {reason}; raise the limit on processes (ulimit -u)")]
    Thread {
        /// The operating system's reason.
        reason: String,
    },
}

/// A read that did not deliver what it was asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadError {
    /// The file.
    pub path: PathBuf,
    /// Offset in the file in bytes.
    pub offset: u64,
    /// Bytes wanted from there.
    pub wanted: u64,
    /// Bytes that arrived.
    pub got: u64,
    /// The operating system's error number; `None` when the file ended early.
    pub errno: Option<i32>,
}

impl ReadError {
    fn next_step(&self) -> &'static str {
        match self.errno.map(Errno::from_raw_os_error) {
            None => "the file is shorter than expected: download it again",
            Some(Errno::IO) => "the drive reports a fault: look at its log (dmesg) and read from another copy",
            Some(Errno::NODEV | Errno::NXIO | Errno::NOTCONN | Errno::STALE) => {
                "the drive is gone: connect it again, or read from another copy"
            }
            Some(_) => "check that the drive is connected and the file can be read",
        }
    }
}

impl fmt::Display for ReadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.path.display();
        let Self {
            offset, wanted, got, ..
        } = self;
        write!(f, "{path}: wanted {wanted} bytes at offset {offset}, got {got}: ")?;
        match self.errno {
            Some(number) => write!(f, "{}", io::Error::from_raw_os_error(number))?,
            None => write!(f, "end of file")?,
        }
        write!(f, "; {}", self.next_step())
    }
}

impl std::error::Error for ReadError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_read_says_all_in_one_line() {
        let error = Error::Expert {
            expert: ExpertId { layer: 3, expert: 17 },
            drive: "/mnt/a".into(),
            read: ReadError {
                path: "/mnt/a/model-00003.safetensors".into(),
                offset: 8192,
                wanted: 4096,
                got: 0,
                errno: Some(Errno::IO.raw_os_error()),
            },
        };
        let text = error.to_string();
        for part in [
            "3/17",
            "drive /mnt/a",
            "model-00003.safetensors",
            "8192",
            "4096 bytes",
            "got 0",
            "os error 5",
            "another copy",
        ] {
            assert!(text.contains(part), "{part} is missing in: {text}");
        }
        assert!(!text.contains('\n'));
    }
}
