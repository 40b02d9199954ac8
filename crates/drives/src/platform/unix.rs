//! Any other Unix: buffered reads.

use std::fs::File;
use std::io;
use std::path::Path;

use memmap2::MmapMut;
use rustix::io::Errno;

use super::{BlockDevice, Mount};

/// Refuses, so that the caller falls back to buffered reads.
pub(crate) fn open_direct(_path: &Path) -> io::Result<File> {
    Err(Errno::INVAL.into())
}

/// Files are opened buffered here.
pub(crate) fn make_buffered(_file: &File) -> io::Result<()> {
    Ok(())
}

/// Opens for writing buffered, and makes the file if it is not there.
pub(crate) fn create_direct(path: &Path) -> io::Result<File> {
    let file = File::options().write(true).create(true).truncate(false).open(path)?;
    Ok(file)
}

/// Gives an empty file its length. The disk's space is taken as it is written.
pub(crate) fn reserve(file: &File, len: u64) -> io::Result<()> {
    file.set_len(len)
}

/// No common call for this.
pub(crate) fn drop_cached(_file: &File, _offset: u64, _len: u64) {}

/// No common call for this.
pub(crate) fn advise_huge(_map: &MmapMut, _start: usize, _len: usize) -> io::Result<()> {
    Err(io::Error::from(io::ErrorKind::Unsupported))
}

/// No common call for this.
pub(crate) fn block_device(_number: u64) -> Option<BlockDevice> {
    None
}

/// No common call for this.
pub(crate) fn mount_of(_folder: &Path) -> Option<Mount> {
    None
}
