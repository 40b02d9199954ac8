//! What can go wrong with packs. Every message is one line: where, what was found, what was expected, what to do.

use std::io;
use std::path::{Path, PathBuf};

use crate::layout::ExpertId;

/// A failure of writing, opening or checking a pack.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum PackError {
    /// The operating system refused an operation.
    #[error("{}: cannot {action}: {reason}; check that the drive is connected and that you may use the path", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What was tried, as a verb.
        action: &'static str,
        /// The operating system's reason.
        reason: String,
    },
    /// A file could not be opened or read.
    #[error(transparent)]
    Read(#[from] crate::Error),
    /// The file is no pack, or its index is damaged.
    #[error("{}: found {found}, expected {expected}; delete this pack and place it again", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What was found.
        found: String,
        /// What was expected.
        expected: String,
    },
    /// The pack was made by a version of the program that this one does not know.
    #[error("{}: found pack version {found}, expected {expected}; use the program that wrote it, or place it again", path.display())]
    Version {
        /// The file.
        path: PathBuf,
        /// The version found.
        found: u32,
        /// The version that this program reads and writes.
        expected: u32,
    },
    /// What shall be put into a pack contradicts itself.
    #[error("cannot make a pack: {problem}; correct the plan")]
    Contents {
        /// What was found and expected.
        problem: String,
    },
    /// Bytes differ from those that the pack was made of.
    #[error(
        "{}: expert {expert} extent {extent}: bytes {start}..{} have checksum {found:08x}, expected {expected:08x}; \
         verify the files of the drives and place damaged packs again",
        path.display(), start + len
    )]
    Damaged {
        /// The pack whose checksum it is.
        path: PathBuf,
        /// The expert.
        expert: ExpertId,
        /// Which of its extents.
        extent: u32,
        /// First byte of the chunk, counted from the extent's start.
        start: u64,
        /// Bytes of the chunk.
        len: u64,
        /// CRC-32C of the bytes.
        found: u32,
        /// CRC-32C when the pack was made.
        expected: u32,
    },
    /// A drive has too little space.
    #[error("{}: found {free} bytes free, expected at least {needed}; free some space or give this drive less", path.display())]
    NoSpace {
        /// A folder or file on the drive.
        path: PathBuf,
        /// Bytes needed.
        needed: u64,
        /// Bytes free.
        free: u64,
    },
    /// Another process writes this pack.
    #[error("{}: found it being written by another process, expected no other; wait until that one has ended", path.display())]
    Busy {
        /// The unfinished file.
        path: PathBuf,
    },
    /// The caller asked to stop.
    #[error("{}: stopped before it was complete, and removed; start again", path.display())]
    Stopped {
        /// The pack.
        path: PathBuf,
    },
}

impl PackError {
    pub(crate) fn io(path: &Path, action: &'static str, error: &io::Error) -> Self {
        Self::Io {
            path: path.to_path_buf(),
            action,
            reason: error.to_string(),
        }
    }

    pub(crate) fn malformed(path: &Path, found: impl Into<String>, expected: impl Into<String>) -> Self {
        Self::Malformed {
            path: path.to_path_buf(),
            found: found.into(),
            expected: expected.into(),
        }
    }
}
