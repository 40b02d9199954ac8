use drives::PackError;
use std::io;
use std::path::{Path, PathBuf};

/// Why there is no converted trunk. Each message is one line: where, what was found, what was expected, what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrunkError {
    /// There is no folder to keep it in.
    #[error(
        "found no folder for cached files (neither XDG_CACHE_HOME nor HOME is set), expected one to keep the int8 trunk in; name one with --trunk-folder"
    )]
    NoFolder,
    /// The operating system refused an operation.
    #[error(
        "{}: cannot {action}: {reason}; name a folder for the int8 trunk that you may write to with --trunk-folder, or leave out --trunk int8",
        path.display()
    )]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What was tried, as a verb.
        action: &'static str,
        /// The operating system's reason.
        reason: String,
    },
    /// The drive has too little space.
    #[error(
        "{}: found {free} bytes free, expected at least {needed} for the int8 trunk; free some space, or name a folder on another drive with --trunk-folder",
        path.display()
    )]
    NoSpace {
        /// The file that was to be written.
        path: PathBuf,
        /// Bytes that it needs.
        needed: u64,
        /// Bytes free.
        free: u64,
    },
    /// A weight cannot be converted.
    #[error(
        "{}: tensor {tensor}: found a weight that is no finite number at row {row}, column {column}, expected finite ones; the file is damaged, fetch it \
         again, or leave out --trunk int8",
        path.display()
    )]
    NotFinite {
        /// The shard.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Row of the matrix.
        row: usize,
        /// Column of the matrix.
        column: usize,
    },
    /// A tensor is damaged in the file, and the model's own weights are not those that it was made of.
    #[error(
        "{}: tensor {tensor}: found checksum {found:08x}, expected {expected:08x}, and converting the model's weights again gave {converted:08x}; \
         delete the file, and the next start makes a new one",
        path.display()
    )]
    Changed {
        /// The trunk file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// CRC-32C of the bytes in the file.
        found: u32,
        /// CRC-32C when the file was made.
        expected: u32,
        /// CRC-32C of a conversion now.
        converted: u32,
    },
}

impl TrunkError {
    pub(super) fn io(path: &Path, action: &'static str, error: &io::Error) -> Self {
        Self::Io {
            path: path.to_path_buf(),
            action,
            reason: error.to_string(),
        }
    }

    /// A failure of writing a file by pages.
    pub(super) fn from_writing(error: PackError) -> crate::Error {
        match error {
            PackError::NoSpace { path, needed, free } => Self::NoSpace { path, needed, free }.into(),
            PackError::Io { path, action, reason } => Self::Io { path, action, reason }.into(),
            PackError::Read(error) => error.into(),
            other => crate::PlacementError::from(other).into(),
        }
    }
}
