//! A file while it is written: under another name, locked, and gone unless it is completed.

use std::fs::{File, TryLockError};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use super::{PACK_SUFFIX, PARTIAL_SUFFIX, PackError};
use crate::platform;

/// What the writer needs of a file.
pub(super) trait Target: Sync {
    /// Writes all of `pages`, whole pages, at `offset`, a page border.
    fn write_pages(&self, pages: &[u8], offset: u64) -> io::Result<()>;
}

/// Removes packs that were being written when their process was killed. Those that a process still writes stay.
///
/// # Errors
///
/// [`PackError::Io`] when the folder cannot be listed or a file cannot be removed.
pub fn sweep_partials(folder: &Path) -> Result<(), PackError> {
    PartialFile::sweep(folder, PACK_SUFFIX)
}

fn is_locked(path: &Path) -> bool {
    let locked = |file: File| matches!(file.try_lock(), Err(TryLockError::WouldBlock));
    File::open(path).is_ok_and(locked)
}

/// An unfinished file of whole pages, such as a pack: locked, and called as it will be with [`PARTIAL_SUFFIX`] behind it. Dropped before
/// [`complete`](Self::complete), it is removed.
pub struct PartialFile {
    file: File,
    path: PathBuf,
    target: PathBuf,
    completed: bool,
}

impl PartialFile {
    /// Removes files whose names will end in `suffix` and whose process was killed. Those that a process still writes stay.
    ///
    /// # Errors
    ///
    /// [`PackError::Io`] when the folder cannot be listed or a file cannot be removed.
    pub fn sweep(folder: &Path, suffix: &str) -> Result<(), PackError> {
        let failed = |error: io::Error| PackError::io(folder, "list", &error);
        let suffix = format!("{suffix}{PARTIAL_SUFFIX}");
        for entry in std::fs::read_dir(folder).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            let is_partial = path
                .file_name()
                .is_some_and(|name| name.to_string_lossy().ends_with(&suffix));
            if is_partial && path.is_file() && !is_locked(&path) {
                std::fs::remove_file(&path).map_err(|error| PackError::io(&path, "remove", &error))?;
            }
        }
        Ok(())
    }

    /// Makes the file that will be `target`, with room for `len` bytes.
    ///
    /// # Errors
    ///
    /// [`PackError::NoSpace`] where the drive has no room, [`PackError::Busy`] when another process writes it, [`PackError::Io`].
    pub fn create(target: &Path, len: u64) -> Result<Self, PackError> {
        let mut path = target.as_os_str().to_owned();
        path.push(PARTIAL_SUFFIX);
        let path = PathBuf::from(path);
        let failed = |action| move |path: &Path, error: io::Error| PackError::io(path, action, &error);
        let file = platform::create_direct(&path).map_err(|error| failed("create")(&path, error))?;
        if let Err(TryLockError::WouldBlock) = file.try_lock() {
            return Err(PackError::Busy { path });
        }
        // Between the two calls another process may have completed the file, which then has its final name.
        let ours = |of: std::fs::Metadata| (of.dev(), of.ino());
        let opened = file
            .metadata()
            .map(ours)
            .map_err(|error| failed("examine")(&path, error))?;
        if std::fs::metadata(&path).map(ours).ok() != Some(opened) {
            return Err(PackError::Busy { path });
        }
        let partial = Self {
            file,
            path,
            target: target.to_path_buf(),
            completed: false,
        };
        let sized = partial
            .file
            .set_len(0)
            .and_then(|()| platform::reserve(&partial.file, len));
        sized.map_err(|error| partial.write_error(&error, len))?;
        Ok(partial)
    }

    /// Where the file is now.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes all of `pages`, whole pages that begin on a page border in memory, at `offset`, a page border.
    ///
    /// # Errors
    ///
    /// The operating system's; [`write_error`](Self::write_error) makes the message of it.
    pub fn write_pages(&self, pages: &[u8], offset: u64) -> io::Result<()> {
        match self.file.write_all_at(pages, offset) {
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                platform::make_buffered(&self.file)?;
                self.file.write_all_at(pages, offset)
            }
            outcome => outcome,
        }
    }

    /// A failed write; a full disk becomes the error that says how much is needed.
    pub fn write_error(&self, error: &io::Error, needed: u64) -> PackError {
        if error.kind() == io::ErrorKind::StorageFull {
            PackError::NoSpace {
                path: self.target.clone(),
                needed,
                free: free_bytes(&self.path).unwrap_or(0),
            }
        } else {
            PackError::io(&self.path, "write", error)
        }
    }

    /// Makes what was written durable, and leaves none of it in the page cache.
    ///
    /// # Errors
    ///
    /// [`PackError::Io`].
    pub fn sync(&self) -> Result<(), PackError> {
        let synced = self.file.sync_all();
        synced.map_err(|error| PackError::io(&self.path, "sync", &error))?;
        platform::drop_cached(&self.file, 0, self.file.metadata().map_or(0, |of| of.len()));
        Ok(())
    }

    /// Gives the file its final name.
    ///
    /// # Errors
    ///
    /// [`PackError::Io`].
    pub fn complete(mut self) -> Result<(), PackError> {
        std::fs::rename(&self.path, &self.target).map_err(|error| PackError::io(&self.path, "rename", &error))?;
        self.completed = true;
        let folder = self.target.parent().unwrap_or(Path::new("/"));
        File::open(folder)
            .and_then(|folder| folder.sync_all())
            .map_err(|error| PackError::io(folder, "sync", &error))
    }
}

impl Target for PartialFile {
    fn write_pages(&self, pages: &[u8], offset: u64) -> io::Result<()> {
        self.write_pages(pages, offset)
    }
}

impl Drop for PartialFile {
    fn drop(&mut self) {
        if !self.completed {
            // What cannot be removed now is removed by the next writer in this folder.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Bytes that may still be written on the file system of `path`.
///
/// # Errors
///
/// The operating system's, when the path cannot be examined.
pub fn free_bytes(path: &Path) -> io::Result<u64> {
    let found = rustix::fs::statvfs(path)?;
    Ok(found.f_bavail.saturating_mul(found.f_frsize))
}
