//! One file, read past the page cache.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Errno;

use crate::error::{Error, ReadError, Result};
use crate::notice::{Notice, Notices};
use crate::page::{PAGE_BYTES, page_floor};
use crate::platform;

/// Most bytes that one system call is asked for. Linux stops at 2 GiB less a page.
const MAX_READ_BYTES: usize = 1 << 30;

/// A file opened read-only for direct reads (O_DIRECT, F_NOCACHE).
///
/// Where the file system refuses direct reads, at opening or at the first read, reads are buffered: a [`Notice`] says so, and
/// the pages of each read are dropped from the page cache again.
#[derive(Debug)]
pub struct DirectFile {
    file: File,
    path: PathBuf,
    len: u64,
    direct: AtomicBool,
    notices: Notices,
}

impl DirectFile {
    /// Opens a file for reading. A fallback to buffered reads, now or later, is added to `notices`.
    ///
    /// # Errors
    ///
    /// [`Error::Open`] when the file cannot be opened.
    pub fn open(path: impl Into<PathBuf>, notices: &Notices) -> Result<Self> {
        let path = path.into();
        let failed = |error: io::Error| Error::Open {
            path: path.clone(),
            reason: error.to_string(),
        };
        let (file, refused) = match platform::open_direct(&path) {
            Ok(file) => (file, None),
            Err(error) if is_refusal(&error) => (File::open(&path).map_err(failed)?, Some(error)),
            Err(error) => return Err(failed(error)),
        };
        let len = file.metadata().map_err(failed)?.len();
        let opened = Self {
            file,
            path,
            len,
            direct: AtomicBool::new(true),
            notices: notices.clone(),
        };
        if let Some(reason) = refused {
            opened.fall_back(&reason).map_err(|error| Error::Open {
                path: opened.path.clone(),
                reason: error.to_string(),
            })?;
        }
        Ok(opened)
    }

    /// The path that the file was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Length in bytes when the file was opened.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the file was empty when it was opened.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether reads go past the page cache.
    pub fn is_direct(&self) -> bool {
        self.direct.load(Ordering::Acquire)
    }

    /// Reads the whole pages of `buf` from `offset`, of which the first `wanted` bytes must arrive.
    ///
    /// The rest of `buf` may keep what it held: `wanted` is less than `buf.len()` where the file ends inside the last page.
    /// `buf` starts on a page border in memory, and `offset` and `buf.len()` are multiples of [`PAGE_BYTES`].
    ///
    /// # Errors
    ///
    /// [`ReadError`] when the device fails or the file ends before `wanted` bytes.
    ///
    /// # Panics
    ///
    /// When `buf`, `offset` or `wanted` break the rule above.
    pub fn read_exact_at(&self, buf: &mut [u8], offset: u64, wanted: usize) -> std::result::Result<(), ReadError> {
        assert!(
            buf.as_ptr().addr().is_multiple_of(PAGE_BYTES)
                && buf.len().is_multiple_of(PAGE_BYTES)
                && offset.is_multiple_of(PAGE_BYTES as u64)
                && wanted <= buf.len(),
            "a direct read takes whole pages"
        );
        let outcome = fill(buf, wanted, |done, part| self.read_some(part, offset + done as u64));
        self.ended(offset, buf.len(), wanted, outcome)
    }

    /// What a read of `len` bytes at `offset` leaves behind: nothing in the page cache, and its outcome with the file's name.
    pub(crate) fn ended(
        &self,
        offset: u64,
        len: usize,
        wanted: usize,
        outcome: std::result::Result<(), Shortfall>,
    ) -> std::result::Result<(), ReadError> {
        if !self.is_direct() {
            platform::drop_cached(&self.file, offset, len as u64);
        }
        outcome.map_err(|Shortfall { got, errno }| ReadError {
            path: self.path.clone(),
            offset,
            wanted: wanted as u64,
            got: got as u64,
            errno,
        })
    }

    /// One system call; once more, buffered, if direct reads turn out to be refused.
    fn read_some(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let direct = self.is_direct();
        match self.file.read_at(buf, offset) {
            Err(error) if self.became_buffered(direct, &error)? => self.file.read_at(buf, offset),
            outcome => outcome,
        }
    }

    /// Whether a read that failed with `error` is worth a second try: it was `direct`, was refused for that, and reads of this
    /// file are buffered from now on.
    pub(crate) fn became_buffered(&self, direct: bool, error: &io::Error) -> io::Result<bool> {
        let refused = direct && is_refusal(error);
        if refused && self.is_direct() {
            self.fall_back(error)?;
        }
        Ok(refused)
    }

    fn fall_back(&self, reason: &io::Error) -> io::Result<()> {
        platform::make_buffered(&self.file)?;
        self.direct.store(false, Ordering::Release);
        self.notices.add(Notice::Buffered {
            folder: self.path.parent().unwrap_or(Path::new("/")).to_path_buf(),
            reason: reason.to_string(),
        });
        Ok(())
    }
}

fn is_refusal(error: &io::Error) -> bool {
    error.raw_os_error() == Some(Errno::INVAL.raw_os_error())
}

impl AsFd for DirectFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// How far a read came that did not deliver what was wanted.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Shortfall {
    pub(crate) got: usize,
    pub(crate) errno: Option<i32>,
}

/// One read on its way through as many system calls as it takes, whoever makes them.
///
/// A short read is continued from the last page border that it reached, since a direct read cannot start inside a page.
#[derive(Debug)]
pub(crate) struct Progress {
    got: usize,
    wanted: usize,
    len: usize,
}

impl Progress {
    /// A read of `len` bytes, of which the first `wanted` must arrive.
    pub(crate) fn new(len: usize, wanted: usize) -> Self {
        Self { got: 0, wanted, len }
    }

    /// The bytes to ask for next; `None` when all that are wanted are there.
    pub(crate) fn next(&self) -> Option<Range<usize>> {
        let from = page_floor(self.got as u64) as usize;
        (self.got < self.wanted).then(|| from..self.len.min(from + MAX_READ_BYTES))
    }

    /// Books the answer to the call that asked for [`next`](Self::next). No byte beyond those known is the end of the file.
    pub(crate) fn book(&mut self, outcome: io::Result<usize>) -> std::result::Result<(), Shortfall> {
        let from = page_floor(self.got as u64) as usize;
        let errno = match outcome {
            Ok(count) if from + count > self.got => {
                self.got = from + count;
                return Ok(());
            }
            Ok(_) => None,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(()),
            // An error of the operating system always has a number; EIO stands for any that has none.
            Err(error) => Some(error.raw_os_error().unwrap_or(Errno::IO.raw_os_error())),
        };
        Err(Shortfall { got: self.got, errno })
    }
}

/// Calls `read(done, part)` until the first `wanted` bytes of `buf` are there.
fn fill(
    buf: &mut [u8],
    wanted: usize,
    mut read: impl FnMut(usize, &mut [u8]) -> io::Result<usize>,
) -> std::result::Result<(), Shortfall> {
    let mut progress = Progress::new(buf.len(), wanted);
    while let Some(range) = progress.next() {
        progress.book(read(range.start, &mut buf[range]))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::AlignedBuf;
    #[cfg(target_os = "linux")]
    use crate::page::resident_pages;
    use std::io::Write;

    /// Reads from `source` in steps: each `Ok(n)` gives at most n bytes, each `Err` that error.
    fn scripted(
        source: &[u8],
        steps: &[std::result::Result<usize, Errno>],
        wanted: usize,
    ) -> (std::result::Result<(), Shortfall>, Vec<u8>, Vec<usize>) {
        let mut buf = vec![0; 4 * PAGE_BYTES];
        let mut steps = steps.iter();
        let mut starts = Vec::new();
        let outcome = fill(&mut buf, wanted, |from, part| {
            starts.push(from);
            match steps.next() {
                Some(Err(errno)) => Err((*errno).into()),
                step => {
                    let most = step.map_or(usize::MAX, |n| n.unwrap_or(0));
                    let count = source.len().saturating_sub(from).min(part.len()).min(most);
                    part[..count].copy_from_slice(&source[from..from + count]);
                    Ok(count)
                }
            }
        });
        (outcome, buf, starts)
    }

    fn pattern(len: usize) -> Vec<u8> {
        (0..len).map(|i| (i * 31 + i / 251) as u8).collect()
    }

    #[test]
    fn short_and_interrupted_reads_are_continued_on_page_borders() {
        let source = pattern(3 * PAGE_BYTES + 100);
        let steps = [Ok(5000), Err(Errno::INTR), Ok(8000)];
        let (outcome, buf, starts) = scripted(&source, &steps, source.len());
        assert_eq!(outcome, Ok(()));
        assert_eq!(&buf[..source.len()], &source[..]);
        assert_eq!(starts, [0, PAGE_BYTES, PAGE_BYTES, 2 * PAGE_BYTES]);
    }

    #[test]
    fn an_early_end_says_how_far_it_came() {
        let source = pattern(PAGE_BYTES + 7);
        let (outcome, ..) = scripted(&source, &[], 2 * PAGE_BYTES);
        let got = PAGE_BYTES + 7;
        assert_eq!(outcome, Err(Shortfall { got, errno: None }));
    }

    #[test]
    fn a_device_error_keeps_its_number() {
        let source = pattern(4 * PAGE_BYTES);
        let (outcome, ..) = scripted(&source, &[Ok(PAGE_BYTES), Err(Errno::IO)], source.len());
        let expected = Shortfall {
            got: PAGE_BYTES,
            errno: Some(Errno::IO.raw_os_error()),
        };
        assert_eq!(outcome, Err(expected));
    }

    #[test]
    fn a_file_that_shrank_is_an_error_with_numbers() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&pattern(3 * PAGE_BYTES)).unwrap();
        let direct = DirectFile::open(file.path(), &Notices::default()).unwrap();
        file.as_file().set_len(100).unwrap();
        let error = AlignedBuf::read_range(&direct, 10, 2 * PAGE_BYTES, 1).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("got 100: end of file"), "{text}");
    }

    #[test]
    fn missing_files_are_named() {
        let error = DirectFile::open("/no/such/shard", &Notices::default()).unwrap_err();
        assert!(error.to_string().starts_with("/no/such/shard: cannot open"));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn refusal_at_opening_gives_a_notice_and_buffered_reads() {
        // procfs has no direct reads.
        let notices = Notices::default();
        let file = DirectFile::open("/proc/version", &notices).unwrap();
        assert!(!file.is_direct());
        let notice = notices.take().pop().unwrap();
        assert!(notice.to_string().starts_with("/proc: direct reads are refused"));
        let mut page = memmap2::MmapMut::map_anon(PAGE_BYTES).unwrap();
        file.read_exact_at(&mut page, 0, 5).unwrap();
        assert_eq!(&page[..5], b"Linux");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn refusal_at_the_first_read_gives_a_notice_and_buffered_reads() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&pattern(2 * PAGE_BYTES)).unwrap();
        let notices = Notices::default();
        let direct = DirectFile::open(file.path(), &notices).unwrap();
        if !direct.is_direct() {
            eprintln!("skipped: the temporary folder refuses direct reads at opening");
            return;
        }
        // An odd address is what ext4 and others answer with EINVAL.
        let mut odd = vec![0; PAGE_BYTES + 1];
        let shift = 1 - odd.as_ptr().addr() % 2;
        let count = direct.read_some(&mut odd[shift..][..PAGE_BYTES], 0).unwrap();
        if direct.is_direct() {
            eprintln!("skipped: the temporary folder takes direct reads to any address");
            return;
        }
        assert_eq!(odd[shift..][..count], pattern(2 * PAGE_BYTES)[..count]);
        assert_eq!(notices.take().len(), 1);
    }

    /// Pages of a file in the page cache.
    #[cfg(target_os = "linux")]
    fn cached_pages(file: &File) -> usize {
        // SAFETY: the file is the test's own and does not shrink while the map lives.
        let map = unsafe { memmap2::Mmap::map(file) }.unwrap();
        resident_pages(&map)
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn reads_leave_nothing_in_the_page_cache() {
        let source = pattern(100 * PAGE_BYTES + 50);
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&source).unwrap();
        file.as_file().sync_all().unwrap();
        rustix::fs::fadvise(file.as_file(), 0, None, rustix::fs::Advice::DontNeed).unwrap();
        if cached_pages(file.as_file()) != 0 {
            eprintln!("skipped: the temporary folder is itself the page cache");
            return;
        }
        let direct = DirectFile::open(file.path(), &Notices::default()).unwrap();
        if direct.is_direct() {
            let buf = AlignedBuf::read_range(&direct, 3, source.len() - 3, 1).unwrap();
            assert!(buf.bytes() == &source[3..]);
            assert_eq!(cached_pages(file.as_file()), 0, "direct");
        } else {
            eprintln!("not tried: the temporary folder refuses direct reads");
        }

        direct.fall_back(&Errno::INVAL.into()).unwrap();
        for (offset, len) in [(4097, 10), (0, 50 * PAGE_BYTES), (3, source.len() - 3)] {
            let buf = AlignedBuf::read_range(&direct, offset, len, 1).unwrap();
            assert!(buf.bytes() == &source[offset as usize..][..len]);
            assert_eq!(cached_pages(file.as_file()), 0, "buffered, {len} bytes");
        }

        // The measure itself: an ordinary read does leave pages.
        std::fs::read(file.path()).unwrap();
        assert!(cached_pages(file.as_file()) > 0);
    }
}
