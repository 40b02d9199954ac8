//! Linux: O_DIRECT, posix_fadvise, transparent huge pages.

use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::path::Path;

use memmap2::{Advice, MmapMut};
use rustix::fs::{self, Mode, OFlags};
use rustix::io::Errno;

const HUGE_PAGE_SETTING: &str = "/sys/kernel/mm/transparent_hugepage/enabled";

/// Opens for reading past the page cache. EINVAL means that the file system refuses direct reads.
pub(crate) fn open_direct(path: &Path) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::DIRECT;
    Ok(File::from(fs::open(path, flags, Mode::empty())?))
}

/// Turns direct reads of an open file off. Read-ahead goes too: it would leave pages behind that nobody asked for.
pub(crate) fn make_buffered(file: &File) -> io::Result<()> {
    fs::fcntl_setfl(file, fs::fcntl_getfl(file)? - OFlags::DIRECT)?;
    fs::fadvise(file, 0, None, fs::Advice::Random)?;
    Ok(())
}

/// Opens for writing past the page cache, and makes the file if it is not there; buffered where the file system refuses.
pub(crate) fn create_direct(path: &Path) -> io::Result<File> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::CLOEXEC;
    let mode = Mode::from_raw_mode(0o644);
    match fs::open(path, flags | OFlags::DIRECT, mode) {
        Err(Errno::INVAL) => Ok(File::from(fs::open(path, flags, mode)?)),
        outcome => Ok(File::from(outcome?)),
    }
}

/// Gives an empty file `len` bytes of the disk, where the file system can.
pub(crate) fn reserve(file: &File, len: u64) -> io::Result<()> {
    match fs::fallocate(file, fs::FallocateFlags::empty(), 0, len) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => file.set_len(len),
        outcome => Ok(outcome?),
    }
}

/// Drops the cached pages of a range. The range is whole pages; the cache may keep them all the same.
pub(crate) fn drop_cached(file: &File, offset: u64, len: u64) {
    if let Some(len) = NonZeroU64::new(len) {
        // The advice is a request: a failure costs memory of the cache and nothing else.
        let _ = fs::fadvise(file, offset, Some(len), fs::Advice::DontNeed);
    }
}

/// Asks for huge pages in `map[start..start + len]`, which begins and ends on huge page borders.
pub(crate) fn advise_huge(map: &MmapMut, start: usize, len: usize) -> io::Result<()> {
    // madvise succeeds even where the setting makes it void.
    let setting = std::fs::read_to_string(HUGE_PAGE_SETTING)
        .map_err(|error| io::Error::other(format!("{HUGE_PAGE_SETTING}: {error}")))?;
    if setting.contains("[never]") {
        return Err(io::Error::other(format!("{HUGE_PAGE_SETTING} says never")));
    }
    map.advise_range(Advice::HugePage, start, len)
}
