//! What keeps a drive from being mounted.

use std::io;
use std::path::PathBuf;

/// Why there is no drive.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The source cannot be read.
    #[error("{}: cannot {action}: {source}; give a file, or a folder whose files you may read", path.display())]
    Source {
        /// The file or folder.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// What the system says.
        source: io::Error,
    },
    /// There is nothing to serve.
    #[error("{}: found no file, expected at least one; give a file, or a folder with files", path.display())]
    Empty {
        /// The folder.
        path: PathBuf,
    },
    /// A file bears the name of the control file.
    #[error("{}: found a file with the name of the control file, expected another name; rename it", path.display())]
    NameTaken {
        /// The file.
        path: PathBuf,
    },
    /// A rate that no drive has.
    #[error("found a rate of {found} bytes a second, expected a number above 0; give another")]
    Rate {
        /// The rate.
        found: f64,
    },
    /// Mounting failed.
    #[error("{}: cannot mount: {source}; it must be an empty folder, and /dev/fuse must be usable", path.display())]
    Mount {
        /// The folder.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// The file system ended with an error.
    #[error("{}: the mount ended: {source}; mount it again", path.display())]
    Session {
        /// The folder.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
}
