//! Experts on demand: the streamer, its barriers, and the loop that keeps drives busy.

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use std::thread::JoinHandle;
use std::time::Duration;

use crate::arena::Arena;
use crate::backend::{Backend, Completion, ReadRequest};
use crate::clock::Clock;
use crate::error::{Error, Result};
use crate::events::{Counters, DriveCounters, EventBatch};
use crate::layout::{DriveId, ExpertId, Layout};
use crate::page::PAGE_BYTES;
use crate::schedule::BarrierId;
use crate::state::{Landed, Next, State};

/// Most bytes of one read. At 14 GB/s that is 0.3 ms, long against the cost of a request, and a barrier ends within one of them.
pub const CHUNK_BYTES: usize = 4 << 20;

/// How long [`Streamer::next`] waits for a lease to be dropped elsewhere when no read can start before that.
pub const LEASE_PATIENCE: Duration = Duration::from_secs(60);

/// Settings of a [`Streamer`].
#[derive(Debug, Clone)]
pub struct StreamOptions {
    /// Most bytes of one read, a multiple of [`PAGE_BYTES`].
    pub chunk_bytes: usize,
    /// See [`LEASE_PATIENCE`].
    pub lease_patience: Duration,
}

impl Default for StreamOptions {
    fn default() -> Self {
        Self {
            chunk_bytes: CHUNK_BYTES,
            lease_patience: LEASE_PATIENCE,
        }
    }
}

/// Brings experts into an arena as they are demanded, and hands them out as they land.
///
/// Reads start as soon as a slot is free, so a barrier may be larger than the arena: it flows through as leases are dropped.
/// Barriers are taken in the order of their demands; several may be open.
pub struct Streamer {
    shared: Arc<Shared>,
    driver: Driver,
    patience: Duration,
}

enum Driver {
    Thread(Option<JoinHandle<()>>),
    Inline(Pump),
}

impl Streamer {
    /// A streamer whose reads are issued by a thread of its own, so that drives stay busy while the caller computes.
    ///
    /// # Errors
    ///
    /// [`Error::ArenaTooSmall`] when a slot does not hold the largest expert, [`Error::ArenaInUse`], [`Error::ChunkSize`], [`Error::Thread`].
    pub fn start(
        layout: Arc<Layout>,
        arena: Arc<Arena>,
        backend: Box<dyn Backend>,
        clock: Arc<dyn Clock>,
        options: &StreamOptions,
    ) -> Result<Self> {
        let mut pump = Pump::new(layout, arena, backend, clock, options)?;
        let shared = Arc::clone(&pump.shared);
        let thread = std::thread::Builder::new()
            .name("drives".into())
            .spawn(move || pump.run())
            .map_err(|error| Error::Thread {
                reason: error.to_string(),
            })?;
        Ok(Self {
            shared,
            driver: Driver::Thread(Some(thread)),
            patience: options.lease_patience,
        })
    }

    /// A streamer that issues reads only inside its own calls, on the caller's thread: for back ends in virtual time, where
    /// everything that happens can be repeated from a seed.
    ///
    /// # Errors
    ///
    /// As [`start`](Self::start).
    pub fn single_threaded(
        layout: Arc<Layout>,
        arena: Arc<Arena>,
        backend: Box<dyn Backend>,
        clock: Arc<dyn Clock>,
        options: &StreamOptions,
    ) -> Result<Self> {
        let pump = Pump::new(layout, arena, backend, clock, options)?;
        Ok(Self {
            shared: Arc::clone(&pump.shared),
            driver: Driver::Inline(pump),
            patience: options.lease_patience,
        })
    }

    /// Asks for experts, each exactly once. Their reads begin at once, in this order.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownExpert`] or [`Error::DemandedTwice`]; then nothing is read.
    pub fn demand(&mut self, experts: &[ExpertId]) -> Result<Barrier> {
        let now_ns = self.shared.clock.now_ns();
        let id = self.shared.lock().demand(experts, now_ns)?;
        match &mut self.driver {
            Driver::Thread(_) => self.shared.waker.wake_by_ref(),
            Driver::Inline(pump) => pump.issue(),
        }
        Ok(Barrier {
            id,
            shared: Arc::clone(&self.shared),
        })
    }

    /// Waits for the next expert of a barrier, in the order in which they land; `None` when all were taken.
    ///
    /// # Errors
    ///
    /// [`Error::Expert`] when a read failed: the barrier is lost and says so each time, the streamer goes on.
    /// [`Error::Stalled`] when no read can start because the caller holds every slot. With a thread of its own the streamer waits
    /// [`StreamOptions::lease_patience`] for other threads to drop leases. [`Error::Stopped`] when that thread has ended.
    pub fn next(&mut self, barrier: &Barrier) -> Result<Option<Landed>> {
        loop {
            let mut state = self.shared.lock();
            match state.next(barrier.id)? {
                Next::Landed(landed) => return Ok(Some(landed)),
                Next::Complete => return Ok(None),
                Next::Waiting => {}
            }
            match &mut self.driver {
                Driver::Thread(_) => match state.stall() {
                    None => drop(self.shared.wait(state, None)),
                    Some(stall) => self.shared.wait_for_lease(state, stall, self.patience)?,
                },
                Driver::Inline(pump) => {
                    drop(state);
                    pump.issue();
                    let state = self.shared.lock();
                    if state.in_flight() == 0 {
                        return Err(state.stall().unwrap_or(Error::Stopped));
                    }
                    drop(state);
                    pump.reap();
                }
            }
        }
    }

    /// Sums since the start.
    pub fn counters(&self) -> Counters {
        self.shared.lock().counters
    }

    /// Sums per drive since the start, in the layout's order.
    pub fn drive_counters(&self) -> Vec<DriveCounters> {
        self.shared.lock().drives.clone()
    }

    /// Read events from number `from` on, as far as they are still kept: the last [`EVENT_CAPACITY`](crate::EVENT_CAPACITY).
    pub fn events(&self, from: u64) -> EventBatch {
        self.shared.lock().events.since(from)
    }

    /// The layout.
    pub fn layout(&self) -> Arc<Layout> {
        Arc::clone(&self.shared.lock().layout)
    }

    /// The arena.
    pub fn arena(&self) -> Arc<Arena> {
        Arc::clone(&self.shared.lock().arena)
    }
}

impl Drop for Streamer {
    /// Waits for the reads in flight; starts no other.
    fn drop(&mut self) {
        self.shared.lock().stopping = true;
        match &mut self.driver {
            Driver::Thread(thread) => {
                self.shared.waker.wake_by_ref();
                if let Some(thread) = thread.take() {
                    // A thread that panicked has told the user already.
                    let _ = thread.join();
                }
            }
            Driver::Inline(pump) => {
                while self.shared.lock().in_flight() > 0 {
                    pump.reap();
                }
            }
        }
    }
}

impl fmt::Debug for Streamer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Streamer")
            .field("counters", &self.counters())
            .finish_non_exhaustive()
    }
}

/// The set of experts that one demand waits for. Dropping it gives up what was not taken.
pub struct Barrier {
    id: BarrierId,
    shared: Arc<Shared>,
}

impl Barrier {
    /// The barrier's number in read events.
    pub fn number(&self) -> u64 {
        self.id.0
    }

    /// Experts that were not taken yet.
    pub fn left(&self) -> usize {
        self.shared.lock().left(self.id)
    }
}

impl Drop for Barrier {
    fn drop(&mut self) {
        self.shared.lock().cancel(self.id);
        self.shared.waker.wake_by_ref();
    }
}

impl fmt::Debug for Barrier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Barrier").field(&self.id.0).finish()
    }
}

/// What the caller's thread and the pump's share.
struct Shared {
    state: Mutex<State>,
    /// Something was booked.
    booked: Condvar,
    waker: Waker,
    clock: Arc<dyn Clock>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>, limit: Option<Duration>) -> MutexGuard<'a, State> {
        match limit {
            None => self.booked.wait(state).unwrap_or_else(PoisonError::into_inner),
            Some(limit) => {
                let waited = self.booked.wait_timeout(state, limit);
                waited.unwrap_or_else(PoisonError::into_inner).0
            }
        }
    }

    /// Waits until a slot came back, or gives the stall as an error when none does.
    fn wait_for_lease(&self, state: MutexGuard<'_, State>, stall: Error, patience: Duration) -> Result<()> {
        if matches!(stall, Error::Stalled { leased: 0, .. }) {
            return Err(stall);
        }
        let releases = state.arena.releases();
        let deadline = std::time::Instant::now() + patience;
        let mut state = state;
        while state.arena.releases() == releases && !state.stopped {
            let left = deadline.saturating_duration_since(std::time::Instant::now());
            if left.is_zero() {
                return Err(stall);
            }
            state = self.wait(state, Some(left));
        }
        Ok(())
    }
}

/// Keeps each drive's depth full and books what ends.
struct Pump {
    shared: Arc<Shared>,
    backend: Box<dyn Backend>,
    drives: Vec<DriveId>,
    reads: Vec<ReadRequest>,
    done: Vec<Completion>,
}

impl Pump {
    fn new(
        layout: Arc<Layout>,
        arena: Arc<Arena>,
        backend: Box<dyn Backend>,
        clock: Arc<dyn Clock>,
        options: &StreamOptions,
    ) -> Result<Self> {
        let chunk = options.chunk_bytes;
        if chunk == 0 || !chunk.is_multiple_of(PAGE_BYTES) || chunk > u32::MAX as usize {
            return Err(Error::ChunkSize { found: chunk });
        }
        if arena.slot_bytes() < layout.slot_bytes() {
            return Err(Error::ArenaTooSmall {
                arena_bytes: arena.bytes(),
                slot_bytes: arena.slot_bytes(),
                needed: layout.slot_bytes(),
            });
        }
        let drives = layout.drive_ids().collect();
        let waker = backend.waker();
        if !arena.attach(waker.clone()) {
            return Err(Error::ArenaInUse);
        }
        let shared = Arc::new(Shared {
            state: Mutex::new(State::new(layout, arena, chunk)),
            booked: Condvar::new(),
            waker,
            clock,
        });
        Ok(Self {
            shared,
            backend,
            drives,
            reads: Vec::new(),
            done: Vec::new(),
        })
    }

    /// The thread's loop: until the streamer is dropped and the last read has ended.
    fn run(&mut self) {
        let _end = StopMark(Arc::clone(&self.shared));
        loop {
            self.issue();
            {
                let state = self.shared.lock();
                if state.stopping && state.in_flight() == 0 {
                    return;
                }
            }
            self.reap();
        }
    }

    /// Starts reads until each drive has as many in flight as it wants or finds no more, one drive after the other in turn.
    fn issue(&mut self) {
        let mut state = self.shared.lock();
        let now_ns = self.shared.clock.now_ns();
        let mut more = true;
        while std::mem::take(&mut more) {
            for &drive in &self.drives {
                if state.drives[drive.index()].in_flight < self.backend.depth(drive)
                    && let Some(read) = state.pull(drive, now_ns)
                {
                    self.reads.push(read);
                    more = true;
                }
            }
        }
        drop(state);
        for read in self.reads.drain(..) {
            self.backend.submit(read);
        }
    }

    /// Waits for the back end and books what ended.
    fn reap(&mut self) {
        self.backend.wait(&mut self.done);
        let mut state = self.shared.lock();
        for completion in self.done.drain(..) {
            state.complete(completion);
        }
        drop(state);
        self.shared.booked.notify_all();
    }
}

impl Drop for Pump {
    fn drop(&mut self) {
        self.shared.lock().arena.detach();
    }
}

/// Tells the caller's thread that the pump has ended, also by a panic.
struct StopMark(Arc<Shared>);

impl Drop for StopMark {
    fn drop(&mut self) {
        self.0.lock().stopped = true;
        self.0.booked.notify_all();
    }
}
