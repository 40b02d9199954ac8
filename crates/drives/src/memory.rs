//! Files in memory, in virtual time, with faults on order: for tests.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::task::{Wake, Waker};
use std::time::Duration;

use crate::backend::{Backend, Completion, ReadRequest};
use crate::clock::{Clock, VirtualClock};
use crate::error::ReadError;
use crate::layout::{DriveId, Layout};

/// What befalls one read of a [`MemoryBackend`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// It fails with this error number.
    Error(i32),
    /// The file seems to end after this many bytes.
    Short(usize),
    /// It takes this many nanoseconds of virtual time. Others may land before it.
    Delay(u64),
}

/// Serves a layout's files from memory.
///
/// Reads land in the order of their virtual landing times, at once unless a [`Fault::Delay`] says otherwise, and move the
/// [`VirtualClock`] to that time. A read's bytes are written at its landing and not before.
pub struct MemoryBackend {
    layout: Arc<Layout>,
    contents: Vec<Vec<u8>>,
    depth: usize,
    clock: Arc<VirtualClock>,
    faults: HashMap<u64, Fault>,
    submitted: u64,
    /// Landing time and submission number of the reads in flight.
    due: BinaryHeap<Reverse<(u64, u64)>>,
    flying: BTreeMap<u64, (ReadRequest, Option<Fault>)>,
    bell: Arc<Bell>,
}

impl MemoryBackend {
    /// A back end with `contents[i]` as the bytes of the layout's file `i`; a file without contents is empty.
    pub fn new(layout: Arc<Layout>, contents: Vec<Vec<u8>>, depth: usize, clock: Arc<VirtualClock>) -> Self {
        Self {
            layout,
            contents,
            depth: depth.max(1),
            clock,
            faults: HashMap::new(),
            submitted: 0,
            due: BinaryHeap::new(),
            flying: BTreeMap::new(),
            bell: Arc::default(),
        }
    }

    /// Lets `fault` befall the read that is submitted as number `nth`, counted from 0.
    pub fn inject(&mut self, nth: u64, fault: Fault) {
        self.faults.insert(nth, fault);
    }

    fn land(&mut self, mut read: ReadRequest, fault: Option<Fault>) -> Completion {
        let contents = self.contents.get(read.file.index()).map_or(&[][..], Vec::as_slice);
        let start = usize::try_from(read.offset).unwrap_or(usize::MAX).min(contents.len());
        let (most, errno) = match fault {
            Some(Fault::Error(errno)) => (0, Some(errno)),
            Some(Fault::Short(most)) => (most, None),
            _ => (usize::MAX, None),
        };
        let got = (contents.len() - start).min(read.window.len()).min(most);
        read.window.bytes_mut()[..got].copy_from_slice(&contents[start..][..got]);
        let outcome = if got >= read.wanted {
            Ok(())
        } else {
            Err(ReadError {
                path: self.layout.files()[read.file.index()].path.clone(),
                offset: read.offset,
                wanted: read.wanted as u64,
                got: got as u64,
                errno,
            })
        };
        Completion {
            ticket: read.ticket,
            window: read.window,
            landed_ns: self.clock.now_ns(),
            outcome,
        }
    }
}

impl Backend for MemoryBackend {
    fn depth(&self, _drive: DriveId) -> usize {
        self.depth
    }

    fn submit(&mut self, read: ReadRequest) {
        let number = self.submitted;
        self.submitted += 1;
        let fault = self.faults.remove(&number);
        let delay = match fault {
            Some(Fault::Delay(ns)) => ns,
            _ => 0,
        };
        let due = self.clock.now_ns().saturating_add(delay);
        self.due.push(Reverse((due, number)));
        self.flying.insert(number, (read, fault));
    }

    fn wait(&mut self, done: &mut Vec<Completion>) {
        let Some(Reverse((due, number))) = self.due.pop() else {
            return self.bell.wait();
        };
        self.clock.advance_to(due);
        if let Some((read, fault)) = self.flying.remove(&number) {
            done.push(self.land(read, fault));
        }
    }

    fn wait_at_most(&mut self, limit: Duration, done: &mut Vec<Completion>) {
        let end = self.clock.now_ns().saturating_add(limit.as_nanos() as u64);
        match self.due.peek() {
            Some(&Reverse((due, _))) if due <= end => self.wait(done),
            _ => self.clock.advance_to(end),
        }
    }

    fn waker(&self) -> Waker {
        Arc::clone(&self.bell).into()
    }
}

/// Remembers that it was rung until somebody waits for it.
#[derive(Default)]
pub(crate) struct Bell {
    rung: Mutex<bool>,
    changed: Condvar,
}

impl Bell {
    pub(crate) fn wait(&self) {
        let mut rung = self.rung.lock().unwrap_or_else(PoisonError::into_inner);
        while !*rung {
            rung = self.changed.wait(rung).unwrap_or_else(PoisonError::into_inner);
        }
        *rung = false;
    }
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        *self.rung.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_all();
    }
}
