//! A file that is replaced in one step or not at all.

use super::SessionError;
use std::fs::{File, TryLockError};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Bytes gathered before they are written.
const BUFFER_BYTES: usize = 1 << 20;
/// What an unfinished file's name ends in.
pub(super) const PARTIAL_SUFFIX: &str = ".partial";

/// A file in the making, beside its target, locked. Dropped before [`finish`](Self::finish), it is removed.
pub(super) struct AtomicFile {
    file: BufWriter<File>,
    partial: PathBuf,
    target: PathBuf,
    finished: bool,
}

impl AtomicFile {
    pub(super) fn create(target: &Path) -> Result<Self, SessionError> {
        // Where the file really goes: a link stays a link.
        let target = std::fs::canonicalize(target).unwrap_or_else(|_| target.to_path_buf());
        let mut partial = target.clone().into_os_string();
        partial.push(PARTIAL_SUFFIX);
        let partial = PathBuf::from(partial);
        let busy = || SessionError::Busy { path: partial.clone() };
        let failed = |error| SessionError::io(&partial, "create", error);
        let file = File::options().write(true).create(true).truncate(false).open(&partial);
        let file = file.map_err(failed)?;
        if let Err(TryLockError::WouldBlock) = file.try_lock() {
            return Err(busy());
        }
        // Between the two calls another process may have finished or removed the file.
        let place = |of: std::fs::Metadata| (of.dev(), of.ino());
        let opened = file.metadata().map(place).map_err(failed)?;
        if std::fs::metadata(&partial).map(place).ok() != Some(opened) {
            return Err(busy());
        }
        file.set_len(0).map_err(failed)?;
        Ok(Self {
            file: BufWriter::with_capacity(BUFFER_BYTES, file),
            partial,
            target,
            finished: false,
        })
    }

    /// Makes the bytes durable, gives them the target's name, and makes the name durable.
    pub(super) fn finish(mut self) -> Result<(), SessionError> {
        let written = self.file.flush().and_then(|()| self.file.get_ref().sync_all());
        written.map_err(|error| SessionError::io(&self.partial, "write", error))?;
        std::fs::rename(&self.partial, &self.target)
            .map_err(|error| SessionError::io(&self.target, "replace", error))?;
        self.finished = true;
        let folder = match self.target.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder,
            _ => Path::new("."),
        };
        let synced = File::open(folder).and_then(|folder| folder.sync_all());
        synced.map_err(|error| SessionError::io(folder, "sync", error))
    }
}

impl Write for AtomicFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        if !self.finished {
            // What cannot be removed now is overwritten by the next one.
            let _ = std::fs::remove_file(&self.partial);
        }
    }
}
