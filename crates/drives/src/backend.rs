//! What a reader back end is.

use std::task::Waker;

use crate::arena::Window;
use crate::error::ReadError;
use crate::layout::{DriveId, FileId};

/// Names one read while it is in flight. The generation tells a read from earlier ones that used the same place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Ticket {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

/// One read: whole pages of a file into a window.
#[derive(Debug)]
pub struct ReadRequest {
    /// Names the read.
    pub ticket: Ticket,
    /// The drive that the file is on.
    pub drive: DriveId,
    /// The file, a place in [`Layout::files`](crate::Layout::files).
    pub file: FileId,
    /// Offset in the file, a multiple of [`PAGE_BYTES`](crate::PAGE_BYTES).
    pub offset: u64,
    /// Bytes that must arrive, counted from the window's start. Less than the window where the file may end inside the last page.
    pub wanted: usize,
    /// Where the bytes go.
    pub window: Window,
}

/// The answer to one read.
#[derive(Debug)]
pub struct Completion {
    /// The read's name.
    pub ticket: Ticket,
    /// The read's window: the back end does not touch it any more.
    pub window: Window,
    /// When the read ended, by the injected clock.
    pub landed_ns: u64,
    /// Whether all wanted bytes arrived.
    pub outcome: Result<(), ReadError>,
}

/// Moves bytes from files into windows. It decides nothing: which piece is read next is the streamer's decision.
///
/// One thread calls it. Each submitted read is answered by exactly one completion, also when it fails. A short read is
/// continued by the back end until all wanted bytes are there or the file ends. Dropping a back end ends its reads first.
pub trait Backend: Send {
    /// How many reads of a drive should be in flight, at least 1.
    fn depth(&self, drive: DriveId) -> usize;

    /// Starts a read, at the latest in the next [`wait`](Self::wait). Never waits for it.
    fn submit(&mut self, read: ReadRequest);

    /// Waits until a read has ended or the waker was woken since the last call, and appends what ended to `done`.
    fn wait(&mut self, done: &mut Vec<Completion>);

    /// Ends a [`wait`](Self::wait), the present or the next one, from any thread.
    fn waker(&self) -> Waker;

    /// How it reads, in a few words for people and records, such as "io_uring, registered memory".
    fn describe(&self) -> String {
        std::any::type_name::<Self>().into()
    }
}
