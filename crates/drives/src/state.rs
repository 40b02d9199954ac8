//! The streamer's books: barriers and hints, experts on their way, reads in flight, sums. No thread, no waiting, no clock: what
//! happens is told to it with its time.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use crate::arena::{Arena, Slot, SlotLease};
use crate::backend::{Completion, ReadRequest};
use crate::counters::{Counters, DriveCounters};
use crate::drive_set::DriveSet;
use crate::error::{Error, ReadError, Result};
use crate::events::{EVENT_CAPACITY, EventRing, ReadClass, ReadEvent};
use crate::job::{Failure, Job, Landing, Side};
use crate::layout::{DriveId, ExpertId, FileId, Layout};
use crate::pace::{Outlook, Pace};
use crate::piece::{Piece, extent_starts};
use crate::report::{BARRIER_CAPACITY, BarrierBatch, BarrierReport, bound_ns};
use crate::schedule::{Ask, BarrierId, Decision, JobId, Schedule};
use crate::stream::{DriveLimits, StreamOptions};
use crate::tickets::Tickets;
use crate::{Notice, Notices};

/// A read is late when it takes this many times as long as was expected when it was issued. Then its piece is read from another
/// home too, if there is one and a slot is free: the first to land counts.
pub const LATE_FACTOR: u64 = 10;

/// A read is not late before this time in nanoseconds: healthy devices pause for tens of milliseconds now and then.
pub const LATE_FLOOR_NS: u64 = 50_000_000;

/// A drive is out after this many failed reads in a row.
pub const FAILURES_OUT: u32 = 4;

/// After this time a drive that leaves work to others looks again whether they do it.
const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// An expert that has landed.
#[derive(Debug)]
pub struct Landed {
    /// Which expert.
    pub expert: ExpertId,
    /// Its bytes, until dropped.
    pub lease: SlotLease,
}

#[derive(Debug)]
struct Flight {
    job: JobId,
    expert: ExpertId,
    barrier: BarrierId,
    class: ReadClass,
    piece: Piece,
    side: Side,
    drive: DriveId,
    file: FileId,
    tried: Vec<FileId>,
    asked_ns: u64,
    issued_ns: u64,
    /// From when on the read counts as late, and whether another drive could then read the piece.
    late_ns: u64,
    contestable: bool,
}

#[derive(Debug)]
struct Barrier {
    /// Experts that were not taken yet, and those that have not landed.
    left: usize,
    awaited: usize,
    landed: VecDeque<(Landed, u64)>,
    failed: Option<Error>,
    report: BarrierReport,
}

/// What the books know of one drive.
#[derive(Debug)]
struct Drive {
    counters: DriveCounters,
    limits: DriveLimits,
    busy_since: u64,
    /// Since when it has had nothing to do although something waits that it holds.
    idle_since: Option<u64>,
    /// It left work to others when it was last asked.
    leaves: bool,
    hint_bytes: usize,
    failures: u32,
}

/// What a barrier has for its consumer.
pub(crate) enum Next {
    Landed(Landed),
    Complete,
    Waiting,
}

pub(crate) struct State {
    pub(crate) layout: Arc<Layout>,
    pub(crate) arena: Arc<Arena>,
    pub(crate) counters: Counters,
    pub(crate) events: Arc<EventRing>,
    /// No read starts any more.
    pub(crate) stopping: bool,
    /// The thread that issues reads has ended.
    pub(crate) stopped: bool,
    notices: Notices,
    floor_bytes: usize,
    drives: Vec<Drive>,
    paces: Vec<Pace>,
    outlook: Outlook,
    out: DriveSet,
    schedule: Schedule,
    tickets: Tickets<Flight>,
    /// No read in flight that has another home is late before this time.
    soonest_late_ns: u64,
    /// Experts that have not landed or, if hinted, not been demanded. Older ones first.
    jobs: BTreeMap<JobId, Job>,
    /// Slots of experts that were handed out in another slot, while a read still writes to them.
    aside: HashMap<JobId, Slot>,
    /// Hinted experts that were not demanded, and how many of them have a slot.
    hinted: HashMap<ExpertId, JobId>,
    hint_slots: usize,
    barriers: HashMap<BarrierId, Barrier>,
    reports: VecDeque<BarrierReport>,
    reported: u64,
    next_job: u64,
    next_barrier: u64,
}

impl State {
    pub(crate) fn new(
        layout: Arc<Layout>,
        arena: Arc<Arena>,
        options: &StreamOptions,
        limits: Vec<DriveLimits>,
    ) -> Self {
        let drive = |limits: DriveLimits| Drive {
            counters: DriveCounters::default(),
            limits,
            busy_since: 0,
            idle_since: None,
            leaves: false,
            hint_bytes: 0,
            failures: 0,
        };
        Self {
            layout,
            arena,
            counters: Counters::default(),
            events: Arc::new(EventRing::new(EVENT_CAPACITY)),
            stopping: false,
            stopped: false,
            notices: options.notices.clone(),
            floor_bytes: options.floor_bytes,
            paces: limits.iter().map(|limits| Pace::new(limits.rate)).collect(),
            drives: limits.into_iter().map(drive).collect(),
            outlook: Outlook::default(),
            out: DriveSet::default(),
            schedule: Schedule::default(),
            tickets: Tickets::default(),
            soonest_late_ns: u64::MAX,
            jobs: BTreeMap::new(),
            aside: HashMap::new(),
            hinted: HashMap::new(),
            hint_slots: 0,
            barriers: HashMap::new(),
            reports: VecDeque::new(),
            reported: 0,
            next_job: 0,
            next_barrier: 0,
        }
    }

    /// Opens a barrier for `experts`. Those that were hinted move to it, with what has landed of them.
    pub(crate) fn demand(&mut self, experts: &[ExpertId], now_ns: u64) -> Result<BarrierId> {
        let mut seen = HashSet::with_capacity(experts.len());
        let mut device_bytes = 0;
        for &expert in experts {
            device_bytes += self.layout.device_bytes(expert).ok_or(Error::UnknownExpert(expert))?;
            if !seen.insert(expert) {
                return Err(Error::DemandedTwice(expert));
            }
        }
        let id = self.open(ReadClass::Demand);
        let mut hinted = Vec::new();
        for &expert in experts {
            match self.hinted.remove(&expert) {
                Some(job) => {
                    self.schedule.promote(job, id);
                    hinted.push(job);
                }
                None => _ = self.push(id, ReadClass::Demand, expert, now_ns),
            }
        }
        self.counters.hints_used += hinted.len() as u64;
        let waiting: Vec<_> = self.schedule.bytes_by_holders(id).collect();
        self.outlook.look(&self.paces, now_ns);
        let report = BarrierReport {
            barrier: id.0,
            experts: experts.len() as u64,
            device_bytes,
            waiting_bytes: waiting.iter().map(|(_, bytes)| bytes).sum(),
            asked_ns: now_ns,
            bound_ns: bound_ns(&waiting, |set| self.outlook.rate_of(set)),
            time_ns: 0,
            last_drive: None,
        };
        let open = Barrier {
            left: experts.len(),
            awaited: experts.len(),
            landed: VecDeque::new(),
            failed: None,
            report,
        };
        self.barriers.insert(id, open);
        for job in hinted {
            if let Some(state) = self.jobs.get_mut(&job) {
                self.hint_slots -= usize::from(state.has_slot());
                state.class = ReadClass::Demand;
                state.barrier = id;
            }
            self.settle(job);
        }
        if experts.is_empty() {
            self.complete_barrier(id);
        }
        Ok(id)
    }

    /// Asks for `experts` that may be demanded. Those that are hinted already stay where they are.
    pub(crate) fn hint(&mut self, experts: &[ExpertId], now_ns: u64) -> Result<BarrierId> {
        if let Some(&unknown) = experts.iter().find(|&&expert| self.layout.extents(expert).is_none()) {
            return Err(Error::UnknownExpert(unknown));
        }
        let id = self.open(ReadClass::Hint);
        for &expert in experts {
            if !self.hinted.contains_key(&expert) {
                let job = self.push(id, ReadClass::Hint, expert, now_ns);
                self.hinted.insert(expert, job);
            }
        }
        Ok(id)
    }

    fn open(&mut self, class: ReadClass) -> BarrierId {
        let id = BarrierId(self.next_barrier);
        self.next_barrier += 1;
        self.schedule.open(id, class);
        id
    }

    fn push(&mut self, barrier: BarrierId, class: ReadClass, expert: ExpertId, now_ns: u64) -> JobId {
        let id = JobId(self.next_job);
        self.next_job += 1;
        self.schedule.push(&self.layout, id, barrier, expert);
        let device_bytes = self.layout.device_bytes(expert).unwrap_or_default();
        self.jobs
            .insert(id, Job::new(barrier, class, expert, device_bytes, now_ns));
        id
    }

    /// Whether a drive has room for a read.
    pub(crate) fn has_room(&self, drive: DriveId) -> bool {
        let drive = &self.drives[drive.index()];
        drive.counters.in_flight < drive.limits.depth
    }

    /// The next read of a drive, which counts as in flight from now on.
    pub(crate) fn pull(&mut self, drive: DriveId, now_ns: u64) -> Option<ReadRequest> {
        if self.stopping {
            return None;
        }
        self.outlook.look(&self.paces, now_ns);
        if let Some(read) = self.pull_late(drive, now_ns) {
            return Some(read);
        }
        self.make_room();
        let limits = &self.drives[drive.index()].limits;
        let hint_room = limits.chunk.saturating_sub(self.drives[drive.index()].hint_bytes);
        let hint_chunk = (limits.chunk / limits.depth).next_multiple_of(crate::PAGE_BYTES);
        let hint_chunk = hint_chunk.clamp(self.floor_bytes.min(limits.chunk), limits.chunk);
        let ask = Ask {
            layout: &self.layout,
            outlook: &self.outlook,
            drive,
            out: self.out,
            // Only this function takes slots, so a free one stays free until the decision is carried out.
            free_slots: self.arena.free_slots(),
            chunk: limits.chunk,
            hint_chunk: if hint_chunk <= hint_room { hint_chunk } else { 0 },
            floor: self.floor_bytes,
        };
        let decision = self.schedule.pull(&ask);
        self.drives[drive.index()].leaves = decision == Decision::Leave;
        let Decision::Read(pull) = decision else {
            return None;
        };
        if pull.starts {
            let slot = self.arena.take()?;
            let job = self.jobs.get_mut(&pull.job)?;
            job.give_slot(Side::First, slot);
            self.hint_slots += usize::from(job.class == ReadClass::Hint);
        }
        let from = (drive, pull.file, pull.offset);
        self.issue(pull.job, Side::First, pull.piece, from, pull.tried, now_ns)
    }

    /// A late piece that the drive holds too, to be read again.
    fn pull_late(&mut self, drive: DriveId, now_ns: u64) -> Option<ReadRequest> {
        if now_ns < self.soonest_late_ns {
            return None;
        }
        self.soonest_late_ns = self.soonest_late();
        let late = |flight: &&Flight| flight.late_ns <= now_ns && flight.drive != drive;
        let contest = self.tickets.values().filter(late).find_map(|flight| {
            let job = self.jobs.get(&flight.job)?;
            let may = flight.side == Side::First
                && job.class == ReadClass::Demand
                && !job.dead
                && job.may_contest(&flight.piece);
            let tried = job.tried(&flight.piece).unwrap_or(&flight.tried);
            let home = flight.piece.home_on(&self.layout, flight.expert, drive, tried);
            home.filter(|_| may)
                .map(|home| (flight.job, flight.piece, home, flight.tried.clone()))
        });
        let (id, piece, (file, offset), tried) = contest?;
        let has_slot = self.jobs.get(&id)?.has_second_slot();
        if !has_slot && self.arena.free_slots() == 0 {
            self.end_hints(1);
        }
        let slot = if has_slot { None } else { Some(self.arena.take()?) };
        let job = self.jobs.get_mut(&id)?;
        if let Some(slot) = slot {
            job.give_slot(Side::Second, slot);
        }
        job.contend(piece, &tried);
        self.counters.rereads += 1;
        self.issue(id, Side::Second, piece, (drive, file, offset), tried, now_ns)
    }

    /// Gives each demanded expert without a slot the slot of a hint, if none is free for it.
    fn make_room(&mut self) {
        let short = self.schedule.unstarted().saturating_sub(self.arena.free_slots());
        if short > 0 && self.hint_slots > 0 {
            self.end_hints(short);
        }
    }

    /// Ends hints, the latest first, so that `slots` slots are free now or when the reads into them end.
    fn end_hints(&mut self, slots: usize) {
        let ending = self.jobs.values().filter(|job| job.dead && job.has_slot()).count();
        let hints = self
            .jobs
            .iter()
            .rev()
            .filter(|(_, job)| job.class == ReadClass::Hint && !job.dead);
        let with_slot = hints.filter(|(_, job)| job.has_slot()).map(|(&id, _)| id);
        let ended: Vec<JobId> = with_slot.take(slots.saturating_sub(ending)).collect();
        for job in ended {
            self.end_job(job);
        }
    }

    fn issue(
        &mut self,
        id: JobId,
        side: Side,
        piece: Piece,
        (drive, file, offset): (DriveId, FileId, u64),
        tried: Vec<FileId>,
        now_ns: u64,
    ) -> Option<ReadRequest> {
        let job = self.jobs.get_mut(&id)?;
        let window = job.lend(side, &piece)?;
        let place = drive.index();
        let books = &mut self.drives[place];
        if books.counters.in_flight == 0 {
            books.busy_since = now_ns;
        }
        if let Some(since) = books.idle_since.take() {
            books.counters.idle_ns += now_ns.saturating_sub(since);
        }
        books.counters.in_flight += 1;
        books.counters.most_in_flight = books.counters.most_in_flight.max(books.counters.in_flight);
        if job.class == ReadClass::Hint {
            books.hint_bytes += piece.len;
        }
        let expected = self.outlook.alone(place, piece.len as u64);
        self.paces[place].issue(piece.len as u64, now_ns);
        let late = (expected as u64).saturating_mul(LATE_FACTOR).max(LATE_FLOOR_NS);
        let extent = self.layout.extents(job.expert)?[piece.extent as usize];
        let contestable = side == Side::First && piece.holders(&self.layout, job.expert, &tried).len() > 1;
        if contestable {
            self.soonest_late_ns = self.soonest_late_ns.min(now_ns.saturating_add(late));
        }
        let ticket = self.tickets.issue(Flight {
            job: id,
            expert: job.expert,
            barrier: job.barrier,
            class: job.class,
            piece,
            side,
            drive,
            file,
            tried,
            asked_ns: job.asked_ns,
            issued_ns: now_ns,
            late_ns: now_ns.saturating_add(late),
            contestable,
        });
        Some(ReadRequest {
            ticket,
            drive,
            file,
            offset,
            // The bytes of the extent end inside the piece's last page, where the file may end too.
            wanted: piece.skip(extent.page_offset) + piece.bytes as usize,
            window,
        })
    }

    /// When the books should be looked at again even if no read ends, from now; `None` when that is of no use.
    pub(crate) fn look_again(&self, now_ns: u64) -> Option<Duration> {
        let to_come = |flight: &&Flight| flight.contestable && flight.late_ns > now_ns;
        let late = self
            .tickets
            .values()
            .filter(to_come)
            .map(|flight| flight.late_ns - now_ns);
        let late = late.min().map(Duration::from_nanos);
        let leaves = self
            .drives
            .iter()
            .any(|drive| drive.leaves && drive.counters.in_flight == 0);
        let leave = leaves.then_some(LOOK_AGAIN);
        late.into_iter().chain(leave).min()
    }

    /// When the reads in flight that have another home begin to be late.
    fn late_times(&self) -> impl Iterator<Item = u64> {
        self.tickets
            .values()
            .filter(|flight| flight.contestable)
            .map(|flight| flight.late_ns)
    }

    fn soonest_late(&self) -> u64 {
        self.late_times().min().unwrap_or(u64::MAX)
    }

    /// Books which drives have nothing to do although they could have. Told after each round of pulls.
    pub(crate) fn note_idle(&mut self, now_ns: u64) {
        for (place, drive) in self.drives.iter_mut().enumerate() {
            if let Some(since) = drive.idle_since.take() {
                drive.counters.idle_ns += now_ns.saturating_sub(since);
            }
            if drive.counters.in_flight == 0 && self.schedule.waits_on(DriveId::at(place), self.out) {
                drive.idle_since = Some(now_ns);
            }
        }
    }

    /// Books the end of a read.
    pub(crate) fn complete(&mut self, completion: Completion) {
        let Some(flight) = self.tickets.take(completion.ticket) else {
            self.counters.stray_completions += 1;
            return;
        };
        let (ok, landed_ns) = (completion.outcome.is_ok(), completion.landed_ns);
        self.count(&flight, landed_ns, ok);
        self.judge(flight.drive, &completion.outcome);
        let Some(job) = self.jobs.get_mut(&flight.job) else {
            return self.end_aside(&flight, completion);
        };
        job.take_back(flight.side, completion.window);
        match completion.outcome {
            Ok(()) => match job.land(flight.side, &flight.piece) {
                Landing::New => {
                    self.counters.pending_device_bytes += flight.piece.len as u64;
                    if let Some(barrier) = self.barriers.get_mut(&job.barrier) {
                        let report = &mut barrier.report;
                        report.time_ns = landed_ns.saturating_sub(report.asked_ns);
                        report.last_drive = Some(flight.drive);
                    }
                }
                Landing::Again => self.counters.reread_device_bytes += flight.piece.len as u64,
            },
            Err(read) if !job.dead => {
                if let Failure::Lost(tried) = job.fail(&flight.piece, flight.file, flight.tried) {
                    self.retry(flight.job, flight.piece, tried, flight.drive, read);
                }
            }
            Err(_) => {}
        }
        self.settle(flight.job);
    }

    /// The end of a read whose expert was handed out in another slot, or is whole in none that it writes to.
    fn end_aside(&mut self, flight: &Flight, completion: Completion) {
        if completion.outcome.is_ok() {
            self.counters.reread_device_bytes += flight.piece.len as u64;
        }
        if let Some(slot) = self.aside.get_mut(&flight.job) {
            slot.take_back(completion.window);
            if slot.is_still() {
                self.aside.remove(&flight.job);
            }
        }
    }

    /// Looks for another home of a piece that could not be read.
    fn retry(&mut self, id: JobId, piece: Piece, tried: Vec<FileId>, drive: DriveId, read: ReadError) {
        if self.schedule.put_back(&self.layout, id, piece, tried) {
            return;
        }
        let Some(job) = self.jobs.get(&id) else {
            return;
        };
        match job.class {
            ReadClass::Hint => self.end_job(id),
            ReadClass::Demand => {
                let (barrier, expert) = (job.barrier, job.expert);
                self.fail(barrier, expert, drive, read);
            }
        }
    }

    /// Marks a drive that keeps failing, and unmarks it when it delivers.
    fn judge(&mut self, drive: DriveId, outcome: &std::result::Result<(), ReadError>) {
        let failures = &mut self.drives[drive.index()].failures;
        let is_out = self.out.contains(drive);
        match outcome {
            Ok(()) => *failures = 0,
            Err(_) => *failures = failures.saturating_add(1),
        }
        let name = || self.layout.drives()[drive.index()].name();
        match outcome {
            Ok(()) if is_out => {
                self.out.remove(drive);
                self.notices.add(Notice::DriveBack { drive: name() });
            }
            Err(read) if !is_out && *failures >= FAILURES_OUT => {
                self.out.insert(drive);
                let reason = read.to_string();
                self.notices.add(Notice::DriveOut { drive: name(), reason });
            }
            _ => {}
        }
    }

    /// What a barrier has for its consumer now.
    pub(crate) fn next(&mut self, id: BarrierId) -> Result<Next> {
        let Some(barrier) = self.barriers.get_mut(&id) else {
            return Ok(Next::Complete);
        };
        if let Some(error) = &barrier.failed {
            return Err(error.clone());
        }
        if let Some((landed, device_bytes)) = barrier.landed.pop_front() {
            barrier.left -= 1;
            self.counters.pending_device_bytes -= device_bytes;
            self.counters.needed_device_bytes += device_bytes;
            return Ok(Next::Landed(landed));
        }
        if barrier.left == 0 {
            return Ok(Next::Complete);
        }
        if self.stopped {
            return Err(Error::Stopped);
        }
        Ok(Next::Waiting)
    }

    /// Experts of a barrier that were not taken yet.
    pub(crate) fn left(&self, id: BarrierId) -> usize {
        self.barriers.get(&id).map_or(0, |barrier| barrier.left)
    }

    /// Hinted experts of a set that were neither demanded nor given up.
    pub(crate) fn hints_left(&self, id: BarrierId) -> usize {
        let open = |job: &&Job| job.barrier == id && !job.dead;
        self.hinted
            .values()
            .filter_map(|job| self.jobs.get(job))
            .filter(open)
            .count()
    }

    /// Forgets a barrier or set of hints. Its slots are free as soon as no read writes to them.
    pub(crate) fn cancel(&mut self, id: BarrierId) {
        self.kill(id);
        self.barriers.remove(&id);
        self.schedule.close(id);
    }

    /// Reads in flight.
    pub(crate) fn in_flight(&self) -> usize {
        self.tickets.len()
    }

    /// The reason why no read is in flight and none can start; `None` when one is, or can.
    pub(crate) fn stall(&self) -> Option<Error> {
        let idle = self.in_flight() == 0 && self.arena.free_slots() == 0;
        // A hint gives its slot up before anybody has to wait.
        if !idle || self.jobs.values().any(Job::has_slot) {
            return None;
        }
        let unread = self.barriers.values().map(|barrier| barrier.landed.len()).sum();
        Some(Error::Stalled {
            slots: self.arena.slots(),
            leased: self.arena.slots() - unread,
            unread,
        })
    }

    pub(crate) fn drive_counters(&self, now_ns: u64) -> Vec<DriveCounters> {
        let counters = |(drive, pace): (&Drive, &Pace)| DriveCounters {
            rate: (pace.rate(now_ns) * 1e9) as u64,
            ..drive.counters.clone()
        };
        self.drives.iter().zip(&self.paces).map(counters).collect()
    }

    /// Reports of complete barriers from number `from` on.
    pub(crate) fn reports(&self, from: u64) -> BarrierBatch {
        let oldest = self.reported - self.reports.len() as u64;
        let first = from.clamp(oldest, self.reported);
        let barriers = self.reports.iter().skip((first - oldest) as usize).copied().collect();
        BarrierBatch { first, barriers }
    }

    fn fail(&mut self, id: BarrierId, expert: ExpertId, drive: DriveId, read: ReadError) {
        self.kill(id);
        let name = self.layout.drives()[drive.index()].name();
        if let Some(barrier) = self.barriers.get_mut(&id) {
            barrier.failed = Some(Error::Expert {
                expert,
                drive: name,
                read,
            });
        }
    }

    /// Ends all work for a barrier or set of hints, started or not.
    fn kill(&mut self, id: BarrierId) {
        if let Some(barrier) = self.barriers.get_mut(&id) {
            for (landed, device_bytes) in barrier.landed.drain(..) {
                self.counters.wasted_device_bytes += device_bytes;
                self.counters.pending_device_bytes -= device_bytes;
                drop(landed);
            }
        }
        let of_barrier = |(&job, state): (&JobId, &Job)| (state.barrier == id).then_some(job);
        let jobs: Vec<JobId> = self.jobs.iter().filter_map(of_barrier).collect();
        for job in jobs {
            self.end_job(job);
        }
    }

    fn end_job(&mut self, id: JobId) {
        self.schedule.forget(id);
        if let Some(job) = self.jobs.get_mut(&id) {
            if job.class == ReadClass::Hint && !job.dead {
                self.hint_slots -= usize::from(job.has_slot());
            }
            job.dead = true;
            if self.hinted.get(&job.expert) == Some(&id) {
                self.hinted.remove(&job.expert);
            }
        }
        self.settle(id);
    }

    /// Ends a job that is demanded and has landed whole, or that is dead and written to by no read.
    fn settle(&mut self, id: JobId) {
        let Some(job) = self.jobs.get_mut(&id) else {
            return;
        };
        if job.dead {
            if job.in_flight == 0 {
                self.counters.wasted_device_bytes += job.landed;
                self.counters.pending_device_bytes -= job.landed;
                self.jobs.remove(&id);
            }
            return;
        }
        if job.class == ReadClass::Hint {
            return;
        }
        let Some(slot) = job.take_filled() else {
            return;
        };
        let landed = Landed {
            expert: job.expert,
            lease: slot.into_lease(extent_ranges(&self.layout, job.expert)),
        };
        let (barrier, device_bytes) = (job.barrier, job.landed);
        self.schedule.forget(id);
        if let Some(rest) = self.jobs.remove(&id).and_then(Job::into_rest)
            && !rest.is_still()
        {
            self.aside.insert(id, rest);
        }
        self.counters.experts_read += 1;
        if let Some(open) = self.barriers.get_mut(&barrier) {
            open.landed.push_back((landed, device_bytes));
            open.awaited -= 1;
            if open.awaited == 0 {
                self.complete_barrier(barrier);
            }
        }
    }

    /// All experts of a barrier have landed.
    fn complete_barrier(&mut self, id: BarrierId) {
        self.schedule.close(id);
        if let Some(barrier) = self.barriers.get(&id) {
            if self.reports.len() == BARRIER_CAPACITY {
                self.reports.pop_front();
            }
            self.reports.push_back(barrier.report);
            self.reported += 1;
        }
    }

    fn count(&mut self, flight: &Flight, landed_ns: u64, ok: bool) {
        let drive = &mut self.drives[flight.drive.index()];
        let (bytes, device_bytes) = (flight.piece.bytes, flight.piece.len as u64);
        drive.counters.busy_ns += landed_ns.saturating_sub(drive.busy_since);
        drive.busy_since = landed_ns.max(drive.busy_since);
        drive.counters.in_flight -= 1;
        if flight.class == ReadClass::Hint {
            drive.hint_bytes -= flight.piece.len;
        }
        self.paces[flight.drive.index()].end(device_bytes, landed_ns, ok);
        if ok {
            drive.counters.reads += 1;
            drive.counters.bytes += bytes;
            drive.counters.device_bytes += device_bytes;
            drive.counters.latency.add(landed_ns.saturating_sub(flight.issued_ns));
            self.counters.reads += 1;
            self.counters.expert_bytes_read += bytes;
            self.counters.device_bytes += device_bytes;
        } else {
            drive.counters.failed_reads += 1;
            self.counters.failed_reads += 1;
        }
        let barrier = self.jobs.get(&flight.job).map_or(flight.barrier, |job| job.barrier);
        self.events.push(&ReadEvent {
            asked_ns: flight.asked_ns,
            issued_ns: flight.issued_ns,
            landed_ns,
            drive: flight.drive,
            expert: flight.expert,
            extent: flight.piece.extent,
            start: flight.piece.start,
            bytes,
            device_bytes,
            class: flight.class,
            barrier: barrier.0,
            ok,
        });
    }
}

/// Where the extents of an expert lie in its slot.
fn extent_ranges(layout: &Layout, expert: ExpertId) -> Box<[Range<usize>]> {
    let extents = layout.extents(expert).unwrap_or_default();
    let starts = extent_starts(extents);
    let range = |(start, len): (usize, u64)| start..start + len as usize;
    starts
        .into_iter()
        .zip(extents.iter().map(|extent| extent.len))
        .map(range)
        .collect()
}
