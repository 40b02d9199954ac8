//! Experts on demand: the streamer, its barriers, and the loop that keeps drives busy.

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use std::thread::JoinHandle;
use std::time::Duration;

use crate::arena::Arena;
use crate::backend::{Backend, Completion, ReadRequest};
use crate::barrier_report::BarrierBatch;
use crate::clock::Clock;
use crate::counters::{Counters, DriveCounters};
use crate::drive_set::MAX_DRIVES;
use crate::error::{Error, Result};
use crate::events::{EventBatch, EventFeed, EventRing};
use crate::layout::{DriveId, ExpertId, Layout};
use crate::notice::Notices;
use crate::page::PAGE_BYTES;
use crate::schedule::{BarrierId, FLOOR_BYTES};
use crate::state::{Landed, Next, State};

/// Most bytes of one read. At 14 GB/s that is 0.3 ms, long against the cost of a request, and a barrier ends within one of them.
pub const CHUNK_BYTES: usize = 4 << 20;

/// How long [`Streamer::next`] waits for a lease to be dropped elsewhere when no read can start before that.
pub const LEASE_PATIENCE: Duration = Duration::from_secs(60);

/// What is known of a drive before it is read. What is `None` is measured, or taken from the [`StreamOptions`] or the back end.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DriveTuning {
    /// Its rate in bytes a second.
    pub rate: Option<u64>,
    /// Bytes of a read at which it is fast: the most of one read, a multiple of [`PAGE_BYTES`].
    pub chunk_bytes: Option<usize>,
    /// Reads in flight that it needs to be fast, at least 1. The back end's own depth is the most.
    pub depth: Option<usize>,
}

/// Settings of a [`Streamer`].
#[derive(Debug, Clone)]
pub struct StreamOptions {
    /// Most bytes of one read, a multiple of [`PAGE_BYTES`].
    pub chunk_bytes: usize,
    /// Pieces do not shrink below this, a multiple of [`PAGE_BYTES`]. See [`FLOOR_BYTES`].
    pub floor_bytes: usize,
    /// What is known of the drives, in the layout's order. Drives beyond its end are unknown.
    pub tuning: Vec<DriveTuning>,
    /// Where it is said that a drive keeps failing.
    pub notices: Notices,
    /// See [`LEASE_PATIENCE`].
    pub lease_patience: Duration,
    /// Slots of the arena in which experts stay after their last lease was dropped, to be handed out again without a read. The
    /// rest, at least one, is for experts on their way.
    pub cache_slots: usize,
}

/// How one drive is read.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DriveLimits {
    pub(crate) rate: Option<u64>,
    pub(crate) chunk: usize,
    pub(crate) depth: usize,
}

impl StreamOptions {
    /// How the drive at a place of the layout is read by a back end with this depth.
    fn limits(&self, place: usize, depth: usize) -> Result<DriveLimits> {
        let tuning = self.tuning.get(place).copied().unwrap_or_default();
        let chunk = tuning.chunk_bytes.unwrap_or(self.chunk_bytes);
        if chunk == 0 || !chunk.is_multiple_of(PAGE_BYTES) || chunk > u32::MAX as usize {
            return Err(Error::ChunkSize { found: chunk });
        }
        Ok(DriveLimits {
            rate: tuning.rate.filter(|&rate| rate > 0),
            chunk,
            depth: tuning.depth.unwrap_or(depth).min(depth).max(1),
        })
    }
}

impl Default for StreamOptions {
    fn default() -> Self {
        Self {
            chunk_bytes: CHUNK_BYTES,
            floor_bytes: FLOOR_BYTES,
            tuning: Vec::new(),
            notices: Notices::default(),
            lease_patience: LEASE_PATIENCE,
            cache_slots: 0,
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
    /// [`Error::ArenaTooSmall`] when a slot does not hold the largest expert, [`Error::CacheTooLarge`], [`Error::ArenaInUse`], [`Error::ChunkSize`],
    /// [`Error::FloorSize`], [`Error::TooManyDrives`], [`Error::Thread`].
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

    /// Asks for experts, each exactly once. Their reads begin at once, those that few drives hold first.
    ///
    /// What a [`hint`](Self::hint) has read of them is not read again.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownExpert`] or [`Error::DemandedTwice`]; then nothing is read.
    pub fn demand(&mut self, experts: &[ExpertId]) -> Result<Barrier> {
        let now_ns = self.shared.clock.now_ns();
        let mut state = self.shared.lock();
        let id = state.demand(experts, now_ns)?;
        let all_there = state.is_complete(id);
        drop(state);
        if !all_there {
            self.start_reads();
        }
        Ok(Barrier {
            id,
            shared: Arc::clone(&self.shared),
        })
    }

    /// Says which experts will perhaps be demanded. They are read where drives would have nothing to do, into slots that no
    /// barrier needs, and kept until a [`demand`](Self::demand) names them, the hint is dropped, or a barrier needs their slots.
    ///
    /// No more than one chunk for each drive is in flight for hints, so that they delay a demand by no more than that.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownExpert`]; then nothing is read.
    pub fn hint(&mut self, experts: &[ExpertId]) -> Result<Hint> {
        let now_ns = self.shared.clock.now_ns();
        let id = self.shared.lock().hint(experts, now_ns)?;
        self.start_reads();
        Ok(Hint {
            id,
            shared: Arc::clone(&self.shared),
        })
    }

    fn start_reads(&mut self) {
        match &mut self.driver {
            Driver::Thread(_) => self.shared.waker.wake_by_ref(),
            Driver::Inline(pump) => pump.issue(),
        }
    }

    /// Waits for the next expert of a barrier, in the order in which they land; `None` when all were taken.
    ///
    /// # Errors
    ///
    /// [`Error::Expert`] when a read failed and no other home was left: the barrier is lost and says so each time, the streamer goes on.
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

    /// The next expert of a barrier that is there already; `None` where [`next`](Self::next) would wait or say that all were taken.
    ///
    /// # Errors
    ///
    /// [`Error::Expert`] as in [`next`](Self::next).
    pub fn try_next(&mut self, barrier: &Barrier) -> Result<Option<Landed>> {
        match self.shared.lock().next(barrier.id)? {
            Next::Landed(landed) => Ok(Some(landed)),
            Next::Complete | Next::Waiting => Ok(None),
        }
    }

    /// Does not keep an expert in memory any more. It is read anew when it is next demanded: for bytes that were found wrong.
    pub fn forget(&mut self, expert: ExpertId) {
        self.shared.lock().forget(expert);
    }

    /// Waits until no read is in flight: those of hints and of dropped barriers too. Then the books say what became of each byte.
    pub fn wait_for_reads(&mut self) {
        loop {
            let state = self.shared.lock();
            match &mut self.driver {
                Driver::Thread(_) if state.in_flight() == 0 || state.stopped => return,
                Driver::Thread(_) => drop(self.shared.wait(state, None)),
                Driver::Inline(pump) => {
                    drop(state);
                    pump.issue();
                    if self.shared.lock().in_flight() == 0 {
                        return;
                    }
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
        let now_ns = self.shared.clock.now_ns();
        self.shared.lock().drive_counters(now_ns)
    }

    /// Reports of complete barriers from number `from` on, as far as they are still kept: the last
    /// [`BARRIER_CAPACITY`](crate::BARRIER_CAPACITY).
    pub fn barriers(&self, from: u64) -> BarrierBatch {
        self.shared.lock().reports(from)
    }

    /// Read events from number `from` on, as far as they are still kept: the last [`EVENT_CAPACITY`](crate::EVENT_CAPACITY).
    ///
    /// Neither this nor the writing of events waits for the other.
    pub fn events(&self, from: u64) -> EventBatch {
        self.shared.events.since(from)
    }

    /// The read events, to be read while the streamer is in use elsewhere, from any thread.
    pub fn event_feed(&self) -> EventFeed {
        EventFeed::new(Arc::clone(&self.shared.events))
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

/// Experts that will perhaps be demanded. Dropping it gives up those that were not.
pub struct Hint {
    id: BarrierId,
    shared: Arc<Shared>,
}

impl Hint {
    /// The hint's number in read events.
    pub fn number(&self) -> u64 {
        self.id.0
    }

    /// Experts that were neither demanded nor given up for the slots of a barrier.
    pub fn left(&self) -> usize {
        self.shared.lock().hints_left(self.id)
    }
}

impl Drop for Hint {
    fn drop(&mut self) {
        self.shared.lock().cancel(self.id);
        self.shared.waker.wake_by_ref();
    }
}

impl fmt::Debug for Hint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Hint").field(&self.id.0).finish()
    }
}

/// What the caller's thread and the pump's share.
struct Shared {
    state: Mutex<State>,
    /// Something was booked.
    booked: Condvar,
    waker: Waker,
    clock: Arc<dyn Clock>,
    events: Arc<EventRing>,
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
    /// Longest wait for the back end.
    look_again: Option<Duration>,
}

impl Pump {
    fn new(
        layout: Arc<Layout>,
        arena: Arc<Arena>,
        backend: Box<dyn Backend>,
        clock: Arc<dyn Clock>,
        options: &StreamOptions,
    ) -> Result<Self> {
        let floor = options.floor_bytes;
        if floor == 0 || !floor.is_multiple_of(PAGE_BYTES) {
            return Err(Error::FloorSize { found: floor });
        }
        let drives: Vec<DriveId> = layout.drive_ids().collect();
        if drives.len() > MAX_DRIVES {
            return Err(Error::TooManyDrives { found: drives.len() });
        }
        let limits = |drive: &DriveId| options.limits(drive.index(), backend.depth(*drive));
        let limits = drives.iter().map(limits).collect::<Result<Vec<_>>>()?;
        if arena.slot_bytes() < layout.slot_bytes() {
            return Err(Error::ArenaTooSmall {
                arena_bytes: arena.bytes(),
                slot_bytes: arena.slot_bytes(),
                needed: layout.slot_bytes(),
            });
        }
        if options.cache_slots >= arena.slots() {
            return Err(Error::CacheTooLarge {
                cache_slots: options.cache_slots,
                slots: arena.slots(),
            });
        }
        let waker = backend.waker();
        if !arena.attach(waker.clone()) {
            return Err(Error::ArenaInUse);
        }
        let state = State::new(layout, arena, options, limits);
        let shared = Arc::new(Shared {
            events: Arc::clone(&state.events),
            state: Mutex::new(state),
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
            look_again: None,
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
                if state.has_room(drive)
                    && let Some(read) = state.pull(drive, now_ns)
                {
                    self.reads.push(read);
                    more = true;
                }
            }
        }
        state.note_idle(now_ns);
        self.look_again = state.look_again(now_ns).filter(|_| state.in_flight() > 0);
        drop(state);
        for read in self.reads.drain(..) {
            self.backend.submit(read);
        }
    }

    /// Waits for the back end and books what ended. Comes after [`issue`](Self::issue).
    fn reap(&mut self) {
        match self.look_again {
            None => self.backend.wait(&mut self.done),
            Some(limit) => self.backend.wait_at_most(limit, &mut self.done),
        }
        let mut state = self.shared.lock();
        for completion in self.done.drain(..) {
            state.complete(completion);
        }
        // A consumer is woken for an expert, not for each of its pieces.
        let wake = std::mem::take(&mut state.news) || state.in_flight() == 0;
        drop(state);
        if wake {
            self.shared.booked.notify_all();
        }
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
