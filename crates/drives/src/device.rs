//! Facts about the device and the file system that a folder is on.

use std::fmt;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::file::DirectFile;
use crate::map::AlignedMap;
use crate::notice::Notices;
use crate::page::PAGE_BYTES;
use crate::platform;

/// A device, as far as the system tells. Two values are equal when nothing shows that the device was changed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// The device's number (`st_dev`).
    pub number: u64,
    /// Its name, such as "nvme0n1p3"; for a file system without a block device, what is mounted, such as "server:/export".
    pub name: Option<String>,
    /// The whole disk that it is on, such as "nvme0n1".
    pub disk: Option<String>,
    /// The disk's model.
    pub model: Option<String>,
    /// The disk's serial number or another name that no other disk has.
    pub serial: Option<String>,
    /// Size of the device in bytes.
    pub size_bytes: Option<u64>,
}

impl Device {
    /// The device that a folder is on.
    ///
    /// # Errors
    ///
    /// [`Error::Open`] when the folder cannot be examined.
    pub fn of(folder: &Path) -> Result<Self> {
        let failed = |error: io::Error| cannot_open(folder, &error);
        let number = std::fs::metadata(folder).map_err(failed)?.dev();
        let mount = platform::mount_of(folder);
        // btrfs gives folders numbers that no block device has. The mount knows the device.
        let source = mount.as_ref().map(|mount| mount.source.clone());
        let behind = source
            .as_ref()
            .filter(|source| source.starts_with('/'))
            .and_then(|source| {
                let found = std::fs::metadata(source).ok()?;
                platform::block_device(found.rdev())
            });
        Ok(match platform::block_device(number).or(behind) {
            Some(block) => Self {
                number,
                name: Some(block.name),
                disk: Some(block.disk),
                model: block.model,
                serial: block.serial,
                size_bytes: block.size_bytes,
            },
            None => Self {
                number,
                name: source,
                disk: None,
                model: None,
                serial: None,
                size_bytes: None,
            },
        })
    }
}

impl fmt::Display for Device {
    /// Its name and model.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.name {
            Some(name) => write!(f, "{name}")?,
            None => write!(f, "device {}", self.number)?,
        }
        self.model.iter().try_for_each(|model| write!(f, " ({model})"))
    }
}

/// Name of the file system that a folder is in, such as "ext4"; `None` where the system does not tell.
pub(crate) fn file_system(folder: &Path) -> Option<String> {
    platform::mount_of(folder).map(|mount| mount.file_system)
}

/// Bytes that an unprivileged user may still write to the file system of a folder; `None` where the system does not tell.
pub(crate) fn free_bytes(folder: &Path) -> Option<u64> {
    let found = rustix::fs::statvfs(folder).ok()?;
    found.f_bavail.checked_mul(found.f_frsize)
}

/// Whether reads of a file go past the page cache, found by reading its first page.
pub(crate) fn takes_direct_reads(file: &Path) -> Result<bool> {
    let file = DirectFile::open(file, &Notices::default())?;
    let mut page = AlignedMap::new(PAGE_BYTES)?;
    let wanted = PAGE_BYTES.min(usize::try_from(file.len()).unwrap_or(PAGE_BYTES));
    let start = page.start;
    file.read_exact_at(&mut page.map[start..][..PAGE_BYTES], 0, wanted)?;
    Ok(file.is_direct())
}

pub(crate) fn cannot_open(path: &Path, error: &io::Error) -> Error {
    Error::Open {
        path: path.to_path_buf(),
        reason: error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_on_some_device() {
        let folder = tempfile::tempdir().unwrap();
        let device = Device::of(folder.path()).unwrap();
        assert_eq!(device, Device::of(folder.path()).unwrap());
        assert!(free_bytes(folder.path()).is_some_and(|bytes| bytes > 0));
        assert!(Device::of(Path::new("/no/such/folder")).is_err());
        let text = serde_json::to_string(&device).unwrap();
        assert_eq!(serde_json::from_str::<Device>(&text).unwrap(), device);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn procfs_is_no_disk_and_takes_no_direct_reads() {
        let device = Device::of(Path::new("/proc")).unwrap();
        assert_eq!((device.name.as_deref(), device.disk), (Some("proc"), None));
        assert_eq!(file_system(Path::new("/proc/self")).as_deref(), Some("proc"));
        assert!(!takes_direct_reads(Path::new("/proc/version")).unwrap());
    }
}
