//! Single reads through a back end, without barriers: for measuring drives, and for testing back ends.

use std::ops::Range;
use std::sync::Arc;
use std::task::Waker;

use crate::arena::{Arena, Slot, SlotLease};
use crate::backend::{Backend, Completion, ReadRequest};
use crate::error::ReadError;
use crate::layout::{DriveId, FileId, Layout};
use crate::page::{PAGE_BYTES, page_ceil};
use crate::tickets::Tickets;

/// Reads page-aligned ranges of a layout's files through a back end, each into a slot of its own, as many at once as the arena
/// has slots. What is in flight is the caller's choice: the back end's depth is not asked.
pub struct RawReads {
    /// Dropped first: it ends its reads.
    backend: Box<dyn Backend>,
    layout: Arc<Layout>,
    arena: Arc<Arena>,
    flights: Tickets<Flight>,
    done: Vec<Completion>,
    strays: u64,
}

struct Flight {
    slot: Slot,
    drive: DriveId,
    file: FileId,
    offset: u64,
    wanted: usize,
}

/// A read of [`RawReads`] that has ended.
#[derive(Debug)]
pub struct RawLanding {
    /// The drive that was read.
    pub drive: DriveId,
    /// The file that was read.
    pub file: FileId,
    /// Offset in the file of the first byte.
    pub offset: u64,
    /// Bytes that were wanted from there.
    pub wanted: usize,
    /// When the read ended, by the back end's clock.
    pub landed_ns: u64,
    /// The bytes, as extent 0 of a lease.
    pub outcome: Result<SlotLease, ReadError>,
}

impl RawReads {
    /// Reads through `backend`, which serves the files of `layout`, into the slots of `arena`.
    pub fn new(backend: Box<dyn Backend>, layout: Arc<Layout>, arena: Arc<Arena>) -> Self {
        Self {
            backend,
            layout,
            arena,
            flights: Tickets::default(),
            done: Vec::new(),
            strays: 0,
        }
    }

    /// Starts a read of `wanted` bytes at `offset`. False, and nothing happens, when no slot is free.
    ///
    /// # Panics
    ///
    /// When `offset` is not a multiple of [`PAGE_BYTES`](crate::PAGE_BYTES), or `wanted` is 0 or more than a slot holds.
    pub fn start(&mut self, file: FileId, offset: u64, wanted: usize) -> bool {
        assert!(
            offset.is_multiple_of(PAGE_BYTES as u64),
            "a direct read takes whole pages"
        );
        let Some(mut slot) = self.arena.take() else {
            return false;
        };
        let whole = page_ceil(wanted as u64).unwrap_or(u64::MAX) as usize;
        let window = slot.lend(0..whole);
        let drive = self.layout.files()[file.index()].drive;
        let ticket = self.flights.issue(Flight {
            slot,
            drive,
            file,
            offset,
            wanted,
        });
        self.backend.submit(ReadRequest {
            ticket,
            drive,
            file,
            offset,
            wanted,
            window,
        });
        true
    }

    /// Reads in flight.
    pub fn in_flight(&self) -> usize {
        self.flights.len()
    }

    /// Waits as [`Backend::wait`] does and appends the reads that ended to `landed`.
    pub fn wait(&mut self, landed: &mut Vec<RawLanding>) {
        self.backend.wait(&mut self.done);
        for completion in self.done.drain(..) {
            let Some(mut flight) = self.flights.take(completion.ticket) else {
                self.strays += 1;
                continue;
            };
            flight.slot.take_back(completion.window);
            let lease = flight.slot.into_lease(Box::new([Range {
                start: 0,
                end: flight.wanted,
            }]));
            landed.push(RawLanding {
                drive: flight.drive,
                file: flight.file,
                offset: flight.offset,
                wanted: flight.wanted,
                landed_ns: completion.landed_ns,
                outcome: completion.outcome.map(|()| lease),
            });
        }
    }

    /// Answers to reads that were not in flight. Not 0 means that the back end is wrong.
    pub fn strays(&self) -> u64 {
        self.strays
    }

    /// The layout whose files are read.
    pub fn layout(&self) -> Arc<Layout> {
        Arc::clone(&self.layout)
    }

    /// The memory that is read into.
    pub fn arena(&self) -> Arc<Arena> {
        Arc::clone(&self.arena)
    }

    /// The back end's waker.
    pub fn waker(&self) -> Waker {
        self.backend.waker()
    }

    /// The back end.
    pub fn backend(&self) -> &dyn Backend {
        &*self.backend
    }
}
