use std::io;
use std::path::{Path, PathBuf};

/// What is wrong with a session file. Each message is one line: where, what was found, what was expected, what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SessionError {
    /// The operating system refused an operation.
    #[error("{}: cannot {action}: {reason}; check that the folder exists, has room, and that you may use it", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What was tried, as a verb.
        action: &'static str,
        /// The operating system's reason.
        reason: String,
    },
    /// The file is something else.
    #[error("{}: found no session file, expected one that begins with ANABSESS; name another file", path.display())]
    NotASession {
        /// The file.
        path: PathBuf,
    },
    /// The file is of another version.
    #[error("{}: found {what} version {found}, expected {expected}; use the program that wrote it, or begin a new session", path.display())]
    Version {
        /// The file.
        path: PathBuf,
        /// Version of what: the format or the arithmetic.
        what: &'static str,
        /// The version found.
        found: u32,
        /// The version that this program reads and writes.
        expected: u32,
    },
    /// The file was written with another model or other settings.
    #[error("{}: found {found}, expected {expected}; {next}", path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
        /// What was found.
        found: String,
        /// What was expected.
        expected: String,
        /// What to do.
        next: &'static str,
    },
    /// Bytes are not those that were written.
    #[error("{}: the file is damaged: found {found}, expected {expected}; delete it and begin anew, or take a copy", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What was found.
        found: String,
        /// What was expected.
        expected: String,
    },
    /// Another process writes this file.
    #[error("{}: found it being written by another process, expected no other; wait until that one has ended", path.display())]
    Busy {
        /// The unfinished file.
        path: PathBuf,
    },
}

impl SessionError {
    pub(crate) fn io(path: &Path, action: &'static str, error: io::Error) -> Self {
        Self::Io {
            path: path.to_path_buf(),
            action,
            reason: error.to_string(),
        }
    }

    pub(crate) fn damaged(path: &Path, found: impl Into<String>, expected: impl Into<String>) -> Self {
        Self::Damaged {
            path: path.to_path_buf(),
            found: found.into(),
            expected: expected.into(),
        }
    }
}
