//! What a path stands for.

use std::fs::{self, File, FileType, OpenOptions, TryLockError};
use std::io::ErrorKind;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::error::Error;

/// Sees that a path is a file, or nothing where it `may_be_new`. A device or a pipe may never end.
pub fn expect_file(path: &Path, may_be_new: bool) -> Result<(), Error> {
    match fs::metadata(path) {
        Ok(found) if found.is_file() => Ok(()),
        Ok(found) => Err(Error::NotAFile {
            path: path.to_owned(),
            found: kind(found.file_type()),
        }),
        Err(error) if may_be_new && error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(Error::file(path, "open", error)),
    }
}

fn kind(found: FileType) -> &'static str {
    match found {
        _ if found.is_dir() => "a folder",
        _ if found.is_fifo() => "a pipe",
        _ if found.is_socket() => "a socket",
        _ => "a device",
    }
}

/// Whether both paths lead to one file.
pub fn are_one(one: &Path, other: &Path) -> bool {
    let place = |path: &Path| fs::metadata(path).map(|found| (found.dev(), found.ino())).ok();
    place(one).is_some_and(|place_of_one| place(other) == Some(place_of_one))
}

/// The right to use a file that is replaced as a whole, for one process at a time: a locked file beside it, removed at the end.
pub struct Claim {
    path: PathBuf,
    /// Locked as long as it is open.
    _file: File,
}

impl Claim {
    /// Claims the file at `path`; `None` when another process has it.
    pub fn take(path: &Path) -> Result<Option<Self>, Error> {
        let mut name = path.as_os_str().to_owned();
        name.push(".lock");
        let path = PathBuf::from(name);
        let failed = |error| Error::file(&path, "create", error);
        loop {
            let file = OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(false)
                .open(&path)
                .map_err(failed)?;
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => return Ok(None),
                Err(TryLockError::Error(error)) => return Err(failed(error)),
            }
            // Its last owner may have removed it in between: then the name stands for another file or none.
            let own = file.metadata().map_err(failed)?;
            match fs::metadata(&path) {
                Ok(named) if (named.dev(), named.ino()) == (own.dev(), own.ino()) => {
                    return Ok(Some(Self { path, _file: file }));
                }
                _ => continue,
            }
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // A lock file that stays is no lock.
        let _ = fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_claim_is_one_processs_and_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.session");
        let claim = Claim::take(&path).unwrap().unwrap();
        assert!(Claim::take(&path).unwrap().is_none());
        drop(claim);
        assert_eq!(folder.path().read_dir().unwrap().count(), 0);
        assert!(Claim::take(&path).unwrap().is_some());
        assert!(Claim::take(&folder.path().join("none/a.session")).is_err());
    }

    #[test]
    fn only_files_are_files() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        assert!(expect_file(&file, true).is_ok() && expect_file(&file, false).is_err());
        fs::write(&file, "").unwrap();
        assert!(expect_file(&file, false).is_ok());
        for (path, found) in [(folder.path(), "a folder"), (Path::new("/dev/null"), "a device")] {
            let text = expect_file(path, true).unwrap_err().to_string();
            assert!(text.contains(found), "{text}");
        }
        let link = folder.path().join("link");
        fs::hard_link(&file, &link).unwrap();
        assert!(
            are_one(&file, &link) && !are_one(&file, folder.path()) && !are_one(&file, &folder.path().join("none"))
        );
    }
}
