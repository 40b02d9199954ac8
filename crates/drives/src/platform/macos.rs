//! macOS: F_NOCACHE. It takes any alignment and refuses no file system.

use std::fs::File;
use std::io;
use std::path::Path;

use memmap2::MmapMut;
use rustix::fs;

use super::{BlockDevice, Mount};

/// Opens for reading past the unified buffer cache.
pub(crate) fn open_direct(path: &Path) -> io::Result<File> {
    let file = File::open(path)?;
    fs::fcntl_nocache(&file, true)?;
    Ok(file)
}

/// Turns caching of an open file on again.
pub(crate) fn make_buffered(file: &File) -> io::Result<()> {
    Ok(fs::fcntl_nocache(file, false)?)
}

/// Opens for writing past the unified buffer cache, and makes the file if it is not there.
pub(crate) fn create_direct(path: &Path) -> io::Result<File> {
    let file = File::options().write(true).create(true).truncate(false).open(path)?;
    fs::fcntl_nocache(&file, true)?;
    Ok(file)
}

/// Gives an empty file its length. The disk's space is taken as it is written.
pub(crate) fn reserve(file: &File, len: u64) -> io::Result<()> {
    file.set_len(len)
}

/// macOS has no call for this.
pub(crate) fn drop_cached(_file: &File, _offset: u64, _len: u64) {}

/// macOS has no such advice for anonymous memory.
pub(crate) fn advise_huge(_map: &MmapMut, _start: usize, _len: usize) -> io::Result<()> {
    Err(io::Error::from(io::ErrorKind::Unsupported))
}

/// macOS tells this through IOKit only.
pub(crate) fn block_device(_number: u64) -> Option<BlockDevice> {
    None
}

/// macOS tells this through IOKit only.
pub(crate) fn mount_of(_folder: &Path) -> Option<Mount> {
    None
}
