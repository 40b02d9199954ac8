//! The files that a drive serves.

use std::ffi::OsString;
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::SystemTime;

use crate::control::CONTROL_NAME;
use crate::error::Error;

/// One file, open.
#[derive(Debug)]
pub(crate) struct Served {
    pub(crate) name: OsString,
    pub(crate) file: File,
    pub(crate) len: u64,
    /// Units of 512 bytes that it takes.
    pub(crate) blocks: u64,
    pub(crate) modified: SystemTime,
}

/// A file alone, or the files of a folder, links followed, by name. Folders in it are left out.
pub(crate) fn open(source: &Path) -> Result<Vec<Served>, Error> {
    let failed = |path: &Path, action: &'static str, source| Error::Source {
        path: path.to_owned(),
        action,
        source,
    };
    let found = fs::metadata(source).map_err(|e| failed(source, "examine", e))?;
    let mut paths = vec![source.to_owned()];
    if found.is_dir() {
        let entries = fs::read_dir(source).and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect());
        paths = entries.map_err(|e| failed(source, "list", e))?;
        paths.sort();
    }
    let mut files = Vec::new();
    for path in paths {
        let found = fs::metadata(&path).map_err(|e| failed(&path, "examine", e))?;
        let Some(name) = path.file_name().filter(|_| found.is_file()) else {
            continue;
        };
        if name == CONTROL_NAME {
            return Err(Error::NameTaken { path });
        }
        files.push(Served {
            name: name.to_owned(),
            file: File::open(&path).map_err(|e| failed(&path, "open", e))?,
            len: found.len(),
            blocks: found.blocks(),
            modified: found.modified().unwrap_or(SystemTime::UNIX_EPOCH),
        });
    }
    match files.is_empty() {
        true => Err(Error::Empty {
            path: source.to_owned(),
        }),
        false => Ok(files),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_a_folder_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        assert!(matches!(open(folder.path()), Err(Error::Empty { .. })));
        fs::write(at("b"), "bytes").unwrap();
        fs::create_dir(at("c")).unwrap();
        std::os::unix::fs::symlink(at("b"), at("a")).unwrap();
        let files = open(folder.path()).unwrap();
        let found: Vec<_> = files.iter().map(|f| (f.name.to_str().unwrap(), f.len)).collect();
        assert_eq!(found, [("a", 5), ("b", 5)]);
        assert_eq!(open(&at("b")).unwrap()[0].name, "b");
        assert!(matches!(open(&at("x")), Err(Error::Source { .. })));
        fs::write(at(CONTROL_NAME), "").unwrap();
        assert!(matches!(open(folder.path()), Err(Error::NameTaken { .. })));
    }
}
