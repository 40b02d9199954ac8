//! The streamer's books: barriers, experts in their slots, reads in flight, sums. No thread, no waiting, no clock: what happens is
//! told to it with its time.

use std::collections::{HashMap, HashSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use crate::arena::{Arena, Slot, SlotLease};
use crate::backend::{Completion, ReadRequest};
use crate::error::{Error, ReadError, Result};
use crate::events::{Counters, DriveCounters, EVENT_CAPACITY, EventRing, ReadClass, ReadEvent};
use crate::layout::{DriveId, ExpertId, Layout};
use crate::schedule::{BarrierId, JobId, Piece, Schedule, extent_starts, pieces};
use crate::tickets::Tickets;

/// An expert that has landed.
#[derive(Debug)]
pub struct Landed {
    /// Which expert.
    pub expert: ExpertId,
    /// Its bytes, until dropped.
    pub lease: SlotLease,
}

/// An expert of a barrier, from its demand until it has landed.
#[derive(Debug)]
struct Job {
    barrier: BarrierId,
    expert: ExpertId,
    asked_ns: u64,
    slot: Option<Slot>,
    /// Pieces that have not landed.
    missing: usize,
    in_flight: usize,
    device_bytes: u64,
    /// Its barrier failed or was dropped: the slot goes back once no read writes to it.
    dead: bool,
}

#[derive(Debug)]
struct Flight {
    job: JobId,
    piece: Piece,
    drive: DriveId,
    issued_ns: u64,
}

#[derive(Debug, Default)]
struct Barrier {
    /// Experts that were not taken yet.
    left: usize,
    landed: VecDeque<(Landed, u64)>,
    failed: Option<Error>,
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
    pub(crate) drives: Vec<DriveCounters>,
    pub(crate) events: EventRing,
    /// No read starts any more.
    pub(crate) stopping: bool,
    /// The thread that issues reads has ended.
    pub(crate) stopped: bool,
    chunk_bytes: usize,
    schedule: Schedule,
    tickets: Tickets<Flight>,
    jobs: HashMap<JobId, Job>,
    barriers: HashMap<BarrierId, Barrier>,
    busy_since: Vec<u64>,
    next_job: u64,
    next_barrier: u64,
}

impl State {
    pub(crate) fn new(layout: Arc<Layout>, arena: Arc<Arena>, chunk_bytes: usize) -> Self {
        let drives = layout.drives().len();
        Self {
            layout,
            arena,
            counters: Counters::default(),
            drives: vec![DriveCounters::default(); drives],
            events: EventRing::new(EVENT_CAPACITY),
            stopping: false,
            stopped: false,
            chunk_bytes,
            schedule: Schedule::default(),
            tickets: Tickets::default(),
            jobs: HashMap::new(),
            barriers: HashMap::new(),
            busy_since: vec![0; drives],
            next_job: 0,
            next_barrier: 0,
        }
    }

    /// Opens a barrier for `experts`.
    pub(crate) fn demand(&mut self, experts: &[ExpertId], now_ns: u64) -> Result<BarrierId> {
        let mut seen = HashSet::with_capacity(experts.len());
        for &expert in experts {
            if self.layout.extents(expert).is_none() {
                return Err(Error::UnknownExpert(expert));
            }
            if !seen.insert(expert) {
                return Err(Error::DemandedTwice(expert));
            }
        }
        let barrier = BarrierId(self.next_barrier);
        self.next_barrier += 1;
        for &expert in experts {
            let id = JobId(self.next_job);
            self.next_job += 1;
            let pieces = pieces(&self.layout, expert, self.chunk_bytes);
            self.schedule.push(id, barrier, expert, &pieces);
            let job = Job {
                barrier,
                expert,
                asked_ns: now_ns,
                slot: None,
                missing: pieces.len(),
                in_flight: 0,
                device_bytes: 0,
                dead: false,
            };
            self.jobs.insert(id, job);
        }
        let open = Barrier {
            left: experts.len(),
            ..Barrier::default()
        };
        self.barriers.insert(barrier, open);
        Ok(barrier)
    }

    /// The next read of a drive, which counts as in flight from now on.
    pub(crate) fn pull(&mut self, drive: DriveId, now_ns: u64) -> Option<ReadRequest> {
        if self.stopping {
            return None;
        }
        // Only this function takes slots, so a free one stays free until the decision is carried out.
        let free_slot = self.arena.free_slots() > 0;
        let pull = self.schedule.pull(&self.layout, drive, free_slot)?;
        let job = self.jobs.get_mut(&pull.job)?;
        if pull.starts {
            job.slot = self.arena.take();
        }
        let range = pull.piece.slot_start..pull.piece.slot_start + pull.piece.len;
        let window = job.slot.as_mut()?.lend(range);
        job.in_flight += 1;
        let counters = &mut self.drives[drive.index()];
        if counters.in_flight == 0 {
            self.busy_since[drive.index()] = now_ns;
        }
        counters.in_flight += 1;
        // The bytes of the extent end inside the piece's last page, where the file may end too.
        let extent = self.layout.extents(job.expert)?[pull.piece.extent as usize];
        let skip = if pull.piece.start == 0 {
            extent.page_offset.into()
        } else {
            0
        };
        let ticket = self.tickets.issue(Flight {
            job: pull.job,
            piece: pull.piece,
            drive,
            issued_ns: now_ns,
        });
        Some(ReadRequest {
            ticket,
            drive,
            file: pull.file,
            offset: pull.offset,
            wanted: skip + pull.piece.bytes as usize,
            window,
        })
    }

    /// Books the end of a read.
    pub(crate) fn complete(&mut self, completion: Completion) {
        let Some(flight) = self.tickets.take(completion.ticket) else {
            self.counters.stray_completions += 1;
            return;
        };
        self.count(&flight, completion.landed_ns, completion.outcome.is_ok());
        let Some(job) = self.jobs.get_mut(&flight.job) else {
            return;
        };
        if let Some(slot) = &mut job.slot {
            slot.take_back(completion.window);
        }
        job.in_flight -= 1;
        match completion.outcome {
            Ok(()) => {
                job.missing -= 1;
                job.device_bytes += flight.piece.len as u64;
            }
            Err(read) if !job.dead => {
                let (barrier, expert) = (job.barrier, job.expert);
                self.fail(barrier, expert, flight.drive, read);
            }
            Err(_) => {}
        }
        self.settle(flight.job);
    }

    /// What a barrier has for its consumer now.
    pub(crate) fn next(&mut self, id: BarrierId) -> Result<Next> {
        let Some(barrier) = self.barriers.get_mut(&id) else {
            return Ok(Next::Complete);
        };
        if let Some(error) = &barrier.failed {
            return Err(error.clone());
        }
        if let Some((landed, _)) = barrier.landed.pop_front() {
            barrier.left -= 1;
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

    /// Forgets a barrier. Its slots are free as soon as no read writes to them.
    pub(crate) fn cancel(&mut self, id: BarrierId) {
        self.kill(id);
        self.barriers.remove(&id);
    }

    /// Reads in flight.
    pub(crate) fn in_flight(&self) -> usize {
        self.tickets.len()
    }

    /// The reason why no read is in flight and none can start; `None` when one is, or can.
    pub(crate) fn stall(&self) -> Option<Error> {
        let idle = self.in_flight() == 0 && self.arena.free_slots() == 0;
        let filling = self.jobs.values().any(|job| job.slot.is_some());
        if !idle || filling {
            return None;
        }
        let unread = self.barriers.values().map(|barrier| barrier.landed.len()).sum();
        Some(Error::Stalled {
            slots: self.arena.slots(),
            leased: self.arena.slots() - unread,
            unread,
        })
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

    /// Ends all work for a barrier, started or not.
    fn kill(&mut self, id: BarrierId) {
        self.schedule.cancel(id);
        if let Some(barrier) = self.barriers.get_mut(&id) {
            for (landed, device_bytes) in barrier.landed.drain(..) {
                self.counters.wasted_device_bytes += device_bytes;
                drop(landed);
            }
        }
        let of_barrier = |(&job, state): (&JobId, &Job)| (state.barrier == id).then_some(job);
        let jobs: Vec<JobId> = self.jobs.iter().filter_map(of_barrier).collect();
        for job in jobs {
            if let Some(state) = self.jobs.get_mut(&job) {
                state.dead = true;
            }
            self.settle(job);
        }
    }

    /// Ends a job that has landed whole, or that is dead and written to by no read.
    fn settle(&mut self, id: JobId) {
        let ended = |job: &Job| job.in_flight == 0 && (job.dead || job.missing == 0);
        if !self.jobs.get(&id).is_some_and(ended) {
            return;
        }
        let Some(job) = self.jobs.remove(&id) else {
            return;
        };
        let barrier = self.barriers.get_mut(&job.barrier);
        match (job.slot, barrier) {
            (Some(slot), Some(barrier)) if !job.dead => {
                let lease = slot.into_lease(extent_ranges(&self.layout, job.expert));
                self.counters.experts_read += 1;
                let landed = Landed {
                    expert: job.expert,
                    lease,
                };
                barrier.landed.push_back((landed, job.device_bytes));
            }
            _ => self.counters.wasted_device_bytes += job.device_bytes,
        }
    }

    fn count(&mut self, flight: &Flight, landed_ns: u64, ok: bool) {
        let drive = &mut self.drives[flight.drive.index()];
        let busy_since = &mut self.busy_since[flight.drive.index()];
        drive.busy_ns += landed_ns.saturating_sub(*busy_since);
        *busy_since = landed_ns.max(*busy_since);
        drive.in_flight -= 1;
        let (bytes, device_bytes) = (flight.piece.bytes, flight.piece.len as u64);
        if ok {
            drive.reads += 1;
            drive.bytes += bytes;
            drive.device_bytes += device_bytes;
            self.counters.reads += 1;
            self.counters.expert_bytes_read += bytes;
            self.counters.device_bytes += device_bytes;
        } else {
            self.counters.failed_reads += 1;
        }
        if let Some(job) = self.jobs.get(&flight.job) {
            self.events.push(ReadEvent {
                asked_ns: job.asked_ns,
                issued_ns: flight.issued_ns,
                landed_ns,
                drive: flight.drive,
                expert: job.expert,
                extent: flight.piece.extent,
                start: flight.piece.start,
                bytes,
                device_bytes,
                class: ReadClass::Demand,
                barrier: job.barrier.0,
                ok,
            });
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
