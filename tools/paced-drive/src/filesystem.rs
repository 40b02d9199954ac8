//! What the kernel asks for: names, sizes, and reads, which go to the queue.

use std::ffi::OsStr;
use std::io;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use fuser::{
    BsdFileFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, InitFlags,
    KernelConfig, LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyOpen,
    ReplyStatfs, ReplyWrite, Request, TimeOrNow, WriteFlags,
};

use crate::control::{CONTROL_NAME, Command, Control};
use crate::queue::Queue;

/// How long the kernel may remember names and sizes: files do not change.
const REMEMBER: Duration = Duration::from_secs(3600);

/// Asynchronous requests that the kernel may have under way, each of at most 1 MiB: more than any depth that drives like.
const MAX_BACKGROUND: u16 = 256;

/// Longest text that is written to the control file at once.
const MAX_COMMAND_BYTES: usize = 4096;

/// Numbers of what is in the mount: the folder has 1, the control file this one, the files those after it.
const CONTROL: u64 = 2;
const FIRST_FILE: u64 = 3;

const BLOCK_BYTES: u32 = 4096;

/// The mount's file system.
#[derive(Debug)]
pub(crate) struct PacedFiles {
    pub(crate) queue: Arc<Queue>,
}

impl PacedFiles {
    fn file(&self, number: INodeNo) -> Option<usize> {
        let place = usize::try_from(number.0.checked_sub(FIRST_FILE)?).ok()?;
        (place < self.queue.files.len()).then_some(place)
    }

    fn find(&self, name: &OsStr) -> Option<INodeNo> {
        if name == CONTROL_NAME {
            return Some(INodeNo(CONTROL));
        }
        let place = self
            .queue
            .files
            .binary_search_by(|file| file.name.as_os_str().cmp(name));
        Some(INodeNo(FIRST_FILE + place.ok()? as u64))
    }

    fn attr(&self, number: INodeNo) -> Option<FileAttr> {
        let attr = |kind, perm, size, blocks, time| FileAttr {
            ino: number,
            size,
            blocks,
            atime: time,
            mtime: time,
            ctime: time,
            crtime: time,
            kind,
            perm,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: BLOCK_BYTES,
            flags: 0,
        };
        match number {
            INodeNo::ROOT => Some(attr(FileType::Directory, 0o755, 0, 0, SystemTime::UNIX_EPOCH)),
            INodeNo(CONTROL) => Some(attr(FileType::RegularFile, 0o644, 0, 0, SystemTime::UNIX_EPOCH)),
            _ => {
                let file = &self.queue.files[self.file(number)?];
                Some(attr(FileType::RegularFile, 0o444, file.len, file.blocks, file.modified))
            }
        }
    }

    /// What a vanished drive answers to everything but its control file.
    fn gone(&self, number: INodeNo) -> bool {
        number != INodeNo(CONTROL) && number != INodeNo::ROOT && !self.queue.is_present()
    }

    fn control(&self) -> Control {
        Control {
            queue: Arc::clone(&self.queue),
        }
    }

    fn status_text(&self) -> Vec<u8> {
        // A status is numbers alone: there is nothing in it that JSON lacks.
        let mut text = serde_json::to_vec(&self.control().status()).unwrap_or_default();
        text.push(b'\n');
        text
    }

    /// Carries out the lines of a text, all or none.
    fn obey(&self, text: &[u8]) -> Result<(), Errno> {
        let text = std::str::from_utf8(text).map_err(|_| Errno::EINVAL)?;
        let lines = text.lines().filter(|line| !line.trim().is_empty());
        let commands: Result<Vec<Command>, String> = lines.map(str::parse).collect();
        for command in commands.map_err(|_| Errno::EINVAL)? {
            self.control().run(command);
        }
        Ok(())
    }
}

impl Filesystem for PacedFiles {
    fn init(&mut self, _req: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // The parts of a direct asynchronous read arrive at once instead of one after the other.
        config
            .add_capabilities(InitFlags::FUSE_ASYNC_DIO)
            .map_err(|_| io::Error::other("the kernel has no asynchronous direct reads over FUSE"))?;
        // Both bounds are fixed and valid.
        let _ = config.set_max_background(MAX_BACKGROUND);
        let _ = config.set_congestion_threshold(MAX_BACKGROUND);
        Ok(())
    }

    fn lookup(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let found = (parent == INodeNo::ROOT).then(|| self.find(name)).flatten();
        match found.and_then(|number| self.attr(number)) {
            Some(attr) if self.gone(attr.ino) => reply.error(Errno::ENODEV),
            Some(attr) => reply.entry(&REMEMBER, &attr, Generation(0)),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _req: &Request, number: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        match self.attr(number) {
            Some(attr) if self.gone(attr.ino) => reply.error(Errno::ENODEV),
            Some(attr) => reply.attr(&REMEMBER, &attr),
            None => reply.error(Errno::ENOENT),
        }
    }

    /// Only the control file may be cut, which shells do before they write; that changes nothing.
    fn setattr(
        &self,
        _req: &Request,
        number: INodeNo,
        _mode: Option<u32>,
        _uid: Option<u32>,
        _gid: Option<u32>,
        _size: Option<u64>,
        _atime: Option<TimeOrNow>,
        _mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        _fh: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        match self.attr(number) {
            Some(attr) if number == INodeNo(CONTROL) => reply.attr(&REMEMBER, &attr),
            _ => reply.error(Errno::EROFS),
        }
    }

    fn open(&self, _req: &Request, number: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        match self.gone(number) {
            true => reply.error(Errno::ENODEV),
            // Every read reaches this drive, whatever the page cache might know.
            false => reply.opened(FileHandle(0), FopenFlags::FOPEN_DIRECT_IO),
        }
    }

    fn read(
        &self,
        _req: &Request,
        number: INodeNo,
        _fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        if number == INodeNo(CONTROL) {
            let text = self.status_text();
            let from = text.len().min(offset as usize);
            let to = text.len().min(from + size as usize);
            return reply.data(&text[from..to]);
        }
        match self.file(number) {
            Some(place) => self.queue.push(place, offset, size as usize, reply),
            None => reply.error(Errno::EISDIR),
        }
    }

    fn write(
        &self,
        _req: &Request,
        number: INodeNo,
        _fh: FileHandle,
        _offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        if number != INodeNo(CONTROL) {
            return reply.error(Errno::EROFS);
        }
        if data.len() > MAX_COMMAND_BYTES {
            return reply.error(Errno::EFBIG);
        }
        match self.obey(data) {
            Ok(()) => reply.written(data.len() as u32),
            Err(error) => reply.error(error),
        }
    }

    fn flush(&self, _req: &Request, _number: INodeNo, _fh: FileHandle, _lock_owner: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }

    fn readdir(&self, _req: &Request, number: INodeNo, _fh: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        if number != INodeNo::ROOT {
            return reply.error(Errno::ENOTDIR);
        }
        let files = self.queue.files.iter().map(|file| file.name.as_os_str());
        let names = [OsStr::new("."), OsStr::new(".."), OsStr::new(CONTROL_NAME)]
            .into_iter()
            .chain(files);
        for (place, name) in names.enumerate().skip(offset as usize) {
            let (number, kind) = match place {
                0 | 1 => (INodeNo::ROOT, FileType::Directory),
                _ => (INodeNo(CONTROL + place as u64 - 2), FileType::RegularFile),
            };
            if reply.add(number, place as u64 + 1, kind, name) {
                break;
            }
        }
        reply.ok();
    }

    /// A drive without a free byte.
    fn statfs(&self, _req: &Request, _number: INodeNo, reply: ReplyStatfs) {
        let blocks: u64 = self
            .queue
            .files
            .iter()
            .map(|file| file.len.div_ceil(BLOCK_BYTES.into()))
            .sum();
        let files = self.queue.files.len() as u64;
        reply.statfs(blocks, 0, 0, files, 0, BLOCK_BYTES, 255, BLOCK_BYTES);
    }
}
