//! The streamer's books: barriers and hints, experts on their way, reads in flight, sums. No thread, no waiting, no clock: what
//! happens is told to it with its time.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use crate::arena::{Arena, Slot, SlotLease};
use crate::barrier_report::{BARRIER_CAPACITY, BarrierBatch, BarrierReport, bound_ns};
use crate::cache::Cache;
use crate::counters::{Counters, DriveCounters};
use crate::drive_set::DriveSet;
use crate::error::{Error, ReadError, Result};
use crate::events::{EVENT_CAPACITY, EventRing, ReadClass};
use crate::job::Job;
use crate::layout::{DriveId, ExpertId, Layout};
use crate::notice::Notices;
use crate::pace::{Outlook, Pace};
use crate::piece::extent_starts;
use crate::schedule::{BarrierId, JobId, Schedule};
use crate::stream::{DriveLimits, StreamOptions};
use crate::tickets::Tickets;

mod reads;

use reads::Flight;
pub use reads::{FAILURES_OUT, LATE_FACTOR, LATE_FLOOR_NS};

/// An expert that has landed.
#[derive(Debug)]
pub struct Landed {
    /// Which expert.
    pub expert: ExpertId,
    /// Its bytes, until dropped.
    pub lease: SlotLease,
    /// Whether it was in memory when it was demanded.
    pub cached: bool,
}

#[derive(Debug)]
struct Barrier {
    /// Experts that were not taken yet, and those that have not landed.
    left: usize,
    awaited: usize,
    /// With the bytes of the devices that are pending for each.
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
    /// Something happened that a consumer may be waiting for, since this was last set to false.
    pub(crate) news: bool,
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
    cache: Cache,
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
            news: false,
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
            cache: Cache::new(options.cache_slots),
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
        // A hint that holds a slot which an earlier barrier needs does not take it along.
        self.make_room();
        let id = self.open(ReadClass::Demand);
        let (mut hinted, mut cached) = (Vec::new(), VecDeque::new());
        for &expert in experts {
            if let Some(lease) = self.cache.get(expert) {
                let landed = Landed {
                    expert,
                    lease,
                    cached: true,
                };
                cached.push_back((landed, 0));
            } else if let Some(job) = self.hinted.remove(&expert) {
                self.schedule.promote(job, id);
                hinted.push(job);
            } else {
                self.push(id, ReadClass::Demand, expert, now_ns);
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
            awaited: experts.len() - cached.len(),
            landed: cached,
            failed: None,
            report,
        };
        let all_there = open.awaited == 0;
        self.barriers.insert(id, open);
        for job in hinted {
            if let Some(state) = self.jobs.get_mut(&job) {
                self.hint_slots -= usize::from(state.has_slot());
                state.class = ReadClass::Demand;
                state.barrier = id;
            }
            self.settle(job);
        }
        if all_there {
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
            if !self.hinted.contains_key(&expert) && !self.cache.holds(expert) {
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
            if landed.cached {
                self.counters.cache_hits += 1;
                self.counters.cached_bytes += self.layout.expert_bytes(landed.expert).unwrap_or_default();
                self.counters.cached_device_bytes += self.layout.device_bytes(landed.expert).unwrap_or_default();
            }
            self.cache.used(landed.expert, &landed.lease);
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

    /// Whether all experts of a barrier are in memory.
    pub(crate) fn is_complete(&self, id: BarrierId) -> bool {
        self.barriers.get(&id).is_some_and(|barrier| barrier.awaited == 0)
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

    /// Lets go of an expert in memory: it is read anew when it is next demanded.
    pub(crate) fn forget(&mut self, expert: ExpertId) {
        self.cache.forget(expert);
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
        let unread = |barrier: &Barrier| barrier.landed.iter().filter(|(landed, _)| !landed.cached).count();
        let unread = self.barriers.values().map(unread).sum();
        // A slot of the cache is missed by nobody, also while it is leased.
        Some(Error::Stalled {
            slots: self.arena.slots(),
            leased: self.arena.slots() - unread - self.cache.len(),
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
            self.news = true;
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
            cached: false,
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
            self.news = true;
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
            self.counters.barriers += 1;
            self.counters.barrier_bound_ns += barrier.report.bound_ns;
            self.counters.barrier_time_ns += barrier.report.time_ns;
            if self.reports.len() == BARRIER_CAPACITY {
                self.reports.pop_front();
            }
            self.reports.push_back(barrier.report);
            self.reported += 1;
        }
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
