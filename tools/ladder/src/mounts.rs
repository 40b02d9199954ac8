//! Folders that paced drives serve and are mounted at.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use crate::Result;

/// Reads the files of a folder, so that a paced drive finds them in the page cache and never waits for the disk below it.
pub fn warm(folder: &Path) -> Result<()> {
    let mut buffer = vec![0; 4 << 20];
    for entry in folder.read_dir()? {
        let path = entry?.path();
        if path.is_file() {
            let mut file = File::open(path)?;
            while file.read(&mut buffer)? > 0 {}
        }
    }
    Ok(())
}

/// An empty folder to mount at, also after a run that was killed.
pub fn clean(at: &Path) -> Result<()> {
    if std::fs::create_dir_all(at).is_err() || at.read_dir().is_ok_and(|mut entries| entries.next().is_some()) {
        let _ = std::process::Command::new("umount").arg("--lazy").arg(at).status();
        std::fs::create_dir_all(at)?;
    }
    Ok(())
}
