//! Which piece is read next. Pure: it knows what waits, what each drive holds and what drives are expected to do, not
//! threads, memory or time.
//!
//! A drive that has room for a read *pulls* a piece. It takes what is demanded before what is only hinted, the earliest barrier
//! first, and of a barrier what the fewest other drives hold. Runs with the same homes form a *group*; an expert that has its
//! slot is finished before the next one is started. While there is plenty, pieces have the drive's chunk size; they shrink as
//! the time shrinks in which the drives can be expected to finish what is left, so that they all end together. When even the
//! smallest piece would end clearly later than the others could do all of it, the drive leaves it to them.
//!
//! An expert is started by its first piece, which needs a free slot. A later barrier starts experts only from slots that the
//! earlier ones do not need, and a hint only from slots that no barrier needs.

use std::collections::{BTreeMap, HashMap, VecDeque};

use crate::drive_set::DriveSet;
use crate::events::ReadClass;
use crate::layout::{DriveId, ExpertId, FileId, Layout};
use crate::pace::Outlook;
use crate::page::page_floor;
use crate::piece::{Piece, runs};

/// Smallest piece in bytes that a run is cut into on purpose: 20 to 50 microseconds of a fast drive, a few times the cost of a
/// request.
pub const FLOOR_BYTES: usize = 256 << 10;

/// A piece is left to other homes that are expected to finish it in a time shorter by this factor.
const CLEARLY_LATER: f64 = 1.1;

/// A piece is this part of what its drive should still read: the rest evens out what the estimate has wrong.
const GUIDED_SHARE: f64 = 0.5;

/// Names an expert of a barrier or hint while it is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct JobId(pub(crate) u64);

/// Names a barrier or a set of hints. Later ones have larger numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct BarrierId(pub(crate) u64);

/// A drive that has room for a read, and the world as it sees it.
pub(crate) struct Ask<'a> {
    pub(crate) layout: &'a Layout,
    pub(crate) outlook: &'a Outlook,
    pub(crate) drive: DriveId,
    /// Drives that keep failing: asked only for what no other drive holds.
    pub(crate) out: DriveSet,
    pub(crate) free_slots: usize,
    /// Most bytes of a demanded piece, and of a hinted one; 0 when no hint may start. Whole pages.
    pub(crate) chunk: usize,
    pub(crate) hint_chunk: usize,
    /// See [`FLOOR_BYTES`].
    pub(crate) floor: usize,
}

impl Ask<'_> {
    /// Of the drives that hold something, those that shall read it.
    fn readers(&self, holders: DriveSet) -> DriveSet {
        readers(holders, self.out)
    }
}

fn readers(holders: DriveSet, out: DriveSet) -> DriveSet {
    let sound = holders.without(out);
    if sound.is_empty() { holders } else { sound }
}

/// What a drive shall read.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Pull {
    pub(crate) job: JobId,
    /// The expert has no slot yet: this piece takes one.
    pub(crate) starts: bool,
    pub(crate) piece: Piece,
    pub(crate) file: FileId,
    pub(crate) offset: u64,
    /// Files that could not deliver the piece before.
    pub(crate) tried: Vec<FileId>,
}

/// What a drive shall do.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Decision {
    Read(Pull),
    /// Nothing, since other drives are expected to do sooner what it could do.
    Leave,
    Nothing,
}

/// A run of an expert, or what is left of it. Empty when all was pulled.
#[derive(Debug)]
struct Run {
    rest: Piece,
    tried: Vec<FileId>,
    holders: DriveSet,
}

#[derive(Debug)]
struct Job {
    queue: BarrierId,
    expert: ExpertId,
    started: bool,
    runs: Vec<Run>,
}

/// A run of a job. It names nothing any more once the job is forgotten, in another queue, or the run is empty.
type RunId = (JobId, u32);

/// Runs that the same drives hold.
#[derive(Debug)]
struct Group {
    holders: DriveSet,
    bytes: u64,
    started: VecDeque<RunId>,
    fresh: VecDeque<RunId>,
}

/// What waits for one barrier or set of hints.
#[derive(Debug, Default)]
struct Queue {
    groups: Vec<Group>,
    bytes: u64,
    /// Experts without a slot.
    unstarted: usize,
}

/// Pieces that no drive has pulled yet.
#[derive(Debug, Default)]
pub(crate) struct Schedule {
    demands: BTreeMap<BarrierId, Queue>,
    hints: BTreeMap<BarrierId, Queue>,
    jobs: HashMap<JobId, Job>,
    candidates: Vec<Candidate>,
}

/// A group from which a drive could pull.
#[derive(Debug, Clone, Copy)]
struct Candidate {
    group: usize,
    readers: DriveSet,
}

impl Schedule {
    /// Opens the queue of a barrier or of a set of hints.
    pub(crate) fn open(&mut self, id: BarrierId, class: ReadClass) {
        let queues = match class {
            ReadClass::Demand => &mut self.demands,
            ReadClass::Hint => &mut self.hints,
        };
        queues.insert(id, Queue::default());
    }

    /// Closes a queue whose jobs are all forgotten or read.
    pub(crate) fn close(&mut self, id: BarrierId) {
        self.demands.remove(&id);
        self.hints.remove(&id);
    }

    /// Appends an expert.
    pub(crate) fn push(&mut self, layout: &Layout, id: JobId, queue: BarrierId, expert: ExpertId) {
        let run = |rest: Piece| Run {
            holders: rest.holders(layout, expert, &[]),
            rest,
            tried: Vec::new(),
        };
        let job = Job {
            queue,
            expert,
            started: false,
            runs: runs(layout, expert).into_iter().map(run).collect(),
        };
        self.enqueue(id, &job);
        self.jobs.insert(id, job);
    }

    /// Moves an expert to another queue.
    pub(crate) fn promote(&mut self, id: JobId, queue: BarrierId) {
        let Some(mut job) = self.jobs.remove(&id) else {
            return;
        };
        self.dequeue(&job);
        job.queue = queue;
        self.enqueue(id, &job);
        self.jobs.insert(id, job);
    }

    /// Gives back a piece that the files in `tried` could not deliver. False when no other file holds it.
    pub(crate) fn put_back(&mut self, layout: &Layout, id: JobId, piece: Piece, tried: Vec<FileId>) -> bool {
        let Some(job) = self.jobs.get_mut(&id) else {
            return false;
        };
        let holders = piece.holders(layout, job.expert, &tried);
        let Some(queue) = queue_of(&mut self.demands, &mut self.hints, job.queue) else {
            return false;
        };
        if holders.is_empty() {
            return false;
        }
        let group = queue.group(holders);
        group.started.push_front((id, job.runs.len() as u32));
        group.bytes += piece.len as u64;
        queue.bytes += piece.len as u64;
        job.runs.push(Run {
            rest: piece,
            tried,
            holders,
        });
        true
    }

    /// Forgets what waits for an expert.
    pub(crate) fn forget(&mut self, id: JobId) {
        if let Some(job) = self.jobs.remove(&id) {
            self.dequeue(&job);
        }
    }

    /// Demanded experts without a slot.
    pub(crate) fn unstarted(&self) -> usize {
        self.demands.values().map(|queue| queue.unstarted).sum()
    }

    /// Whether a drive holds something demanded that no drive has pulled yet.
    pub(crate) fn waits_on(&self, drive: DriveId, out: DriveSet) -> bool {
        let held = |group: &Group| group.bytes > 0 && readers(group.holders, out).contains(drive);
        self.demands.values().any(|queue| queue.groups.iter().any(held))
    }

    /// Bytes of a queue that no drive has pulled yet, by who holds them.
    pub(crate) fn bytes_by_holders(&self, id: BarrierId) -> impl Iterator<Item = (DriveSet, u64)> {
        let queue = self.demands.get(&id).or_else(|| self.hints.get(&id));
        let groups = queue.map_or(&[][..], |queue| &queue.groups[..]);
        groups.iter().map(|group| (group.holders, group.bytes))
    }

    /// Decides what a drive reads next. The piece leaves the schedule.
    pub(crate) fn pull(&mut self, ask: &Ask) -> Decision {
        let mut left = false;
        let mut reserved = 0;
        let mut found = None;
        for (&id, queue) in &mut self.demands {
            let may_start = ask.free_slots > reserved;
            found = queue.choose(
                ask,
                id,
                &self.jobs,
                may_start,
                ask.chunk,
                &mut self.candidates,
                &mut left,
            );
            if found.is_some() {
                break;
            }
            reserved += queue.unstarted;
        }
        if found.is_none() && ask.hint_chunk > 0 {
            let may_start = ask.free_slots > reserved;
            for (&id, queue) in &mut self.hints {
                let chunk = ask.hint_chunk;
                found = queue.choose(ask, id, &self.jobs, may_start, chunk, &mut self.candidates, &mut left);
                if found.is_some() {
                    break;
                }
            }
        }
        match found.and_then(|(run, len)| self.take(ask, run, len)) {
            Some(pull) => Decision::Read(pull),
            None if left => Decision::Leave,
            None => Decision::Nothing,
        }
    }

    /// Takes the first `len` bytes of a run.
    fn take(&mut self, ask: &Ask, (id, index): RunId, len: usize) -> Option<Pull> {
        let job = self.jobs.get_mut(&id)?;
        let run = job.runs.get_mut(index as usize)?;
        let (file, offset) = run.rest.home_on(ask.layout, job.expert, ask.drive, &run.tried)?;
        let piece = if len < run.rest.len {
            let extent = ask.layout.extents(job.expert)?[run.rest.extent as usize];
            run.rest.split(extent.page_offset, len)
        } else {
            let whole = run.rest;
            run.rest.len = 0;
            whole
        };
        let pull = Pull {
            job: id,
            starts: !job.started,
            piece,
            file,
            offset,
            tried: run.tried.clone(),
        };
        let queue = queue_of(&mut self.demands, &mut self.hints, job.queue)?;
        queue.bytes -= piece.len as u64;
        queue.group(run.holders).bytes -= piece.len as u64;
        if pull.starts {
            job.started = true;
            queue.unstarted -= 1;
            for (index, run) in job.runs.iter().enumerate() {
                queue.group(run.holders).started.push_back((id, index as u32));
            }
        }
        Some(pull)
    }

    fn enqueue(&mut self, id: JobId, job: &Job) {
        let Some(queue) = queue_of(&mut self.demands, &mut self.hints, job.queue) else {
            return;
        };
        for (index, run) in job.runs.iter().enumerate() {
            let group = queue.group(run.holders);
            let line = if job.started {
                &mut group.started
            } else {
                &mut group.fresh
            };
            line.push_back((id, index as u32));
            group.bytes += run.rest.len as u64;
            queue.bytes += run.rest.len as u64;
        }
        queue.unstarted += usize::from(!job.started);
    }

    fn dequeue(&mut self, job: &Job) {
        let Some(queue) = queue_of(&mut self.demands, &mut self.hints, job.queue) else {
            return;
        };
        for run in &job.runs {
            queue.group(run.holders).bytes -= run.rest.len as u64;
            queue.bytes -= run.rest.len as u64;
        }
        queue.unstarted -= usize::from(!job.started);
    }
}

fn queue_of<'a>(
    demands: &'a mut BTreeMap<BarrierId, Queue>,
    hints: &'a mut BTreeMap<BarrierId, Queue>,
    id: BarrierId,
) -> Option<&'a mut Queue> {
    demands.get_mut(&id).or_else(|| hints.get_mut(&id))
}

impl Queue {
    fn group(&mut self, holders: DriveSet) -> &mut Group {
        let known = self.groups.iter().position(|group| group.holders == holders);
        let place = known.unwrap_or_else(|| {
            self.groups.push(Group {
                holders,
                bytes: 0,
                started: VecDeque::new(),
                fresh: VecDeque::new(),
            });
            self.groups.len() - 1
        });
        &mut self.groups[place]
    }

    /// The run from which the drive takes its next piece, and the piece's length.
    #[expect(clippy::too_many_arguments, reason = "parts of one schedule, borrowed apart")]
    fn choose(
        &mut self,
        ask: &Ask,
        id: BarrierId,
        jobs: &HashMap<JobId, Job>,
        may_start: bool,
        chunk: usize,
        candidates: &mut Vec<Candidate>,
        left: &mut bool,
    ) -> Option<(RunId, usize)> {
        if self.bytes == 0 {
            return None;
        }
        candidates.clear();
        for (place, group) in self.groups.iter().enumerate() {
            if group.bytes > 0 && (may_start || !group.started.is_empty()) {
                let readers = ask.readers(group.holders);
                if readers.contains(ask.drive) {
                    candidates.push(Candidate { group: place, readers });
                }
            }
        }
        candidates.sort_unstable_by_key(|candidate| (candidate.readers.len(), candidate.group));
        for level in candidates.chunk_by_mut(|a, b| a.readers.len() == b.readers.len()) {
            // Of as many homes, first what takes them longest.
            let pressure = |candidate: &Candidate| {
                self.groups[candidate.group].bytes as f64 / ask.outlook.rate_of(candidate.readers)
            };
            level.sort_by(|a, b| pressure(b).total_cmp(&pressure(a)));
            for candidate in level {
                let Some((job, index)) = self.groups[candidate.group].first(id, jobs, may_start) else {
                    continue;
                };
                let rest = jobs.get(&job)?.runs[index as usize].rest.len;
                match self.length(ask, candidate, chunk, rest) {
                    Some(len) => return Some(((job, index), len)),
                    None => *left = true,
                }
            }
        }
        None
    }

    /// How much of a run of `rest` bytes the drive reads at once; `None` when it is left to others.
    fn length(&self, ask: &Ask, candidate: &Candidate, chunk: usize, rest: usize) -> Option<usize> {
        let floor = ask.floor.min(chunk);
        let readers = candidate.readers;
        let others = readers.without([ask.drive.index()].into_iter().collect());
        if others.is_empty() {
            return Some(cut(rest, chunk, floor, chunk));
        }
        // What only the readers can do, and what everybody can: the work ends no sooner than either.
        let (mut inside, mut elsewhere) = (0, 0);
        let mut everybody = DriveSet::default();
        for group in &self.groups {
            let holders = ask.readers(group.holders);
            if group.bytes > 0 {
                everybody = everybody.union(holders);
            }
            if holders.is_subset(readers) {
                inside += group.bytes;
            }
            if holders.len() > 1 || !holders.contains(ask.drive) {
                elsewhere += group.bytes;
            }
        }
        let mut rivals = everybody;
        rivals.remove(ask.drive);

        let (outlook, place) = (ask.outlook, ask.drive.index());
        let smallest = floor.min(rest) as u64;
        let soonest = others.places().map(|other| outlook.alone(other, smallest));
        let without = soonest
            .fold(f64::INFINITY, f64::min)
            .max(outlook.shared(others, inside))
            .max(outlook.shared(rivals, elsewhere));
        if outlook.alone(place, smallest) > CLEARLY_LATER * without {
            return None;
        }
        let end = outlook
            .shared(readers, inside)
            .max(outlook.shared(everybody, self.bytes));
        let share = outlook.rate(place) * (end - outlook.free(place)) * GUIDED_SHARE;
        let target = page_floor((share.max(0.0) as u64).clamp(floor as u64, chunk as u64)) as usize;
        Some(cut(rest, target, floor, chunk))
    }
}

/// Cuts `target` bytes from a run of `rest`, all of whole pages, so that neither part is much smaller than `floor`.
fn cut(rest: usize, target: usize, floor: usize, chunk: usize) -> usize {
    if rest <= target || (rest <= chunk && rest - target < floor / 2) {
        rest
    } else if rest - target < floor / 2 {
        page_floor(rest as u64 / 2) as usize
    } else {
        target
    }
}

impl Group {
    /// The run that is next in line; one of an expert without a slot only when `may_start`.
    fn first(&mut self, queue: BarrierId, jobs: &HashMap<JobId, Job>, may_start: bool) -> Option<RunId> {
        let waits = |&(id, index): &RunId, started: bool| {
            jobs.get(&id).is_some_and(|job| {
                job.queue == queue && job.started == started && job.runs[index as usize].rest.len > 0
            })
        };
        while self.started.front().is_some_and(|run| !waits(run, true)) {
            self.started.pop_front();
        }
        if let Some(&run) = self.started.front() {
            return Some(run);
        }
        if !may_start {
            return None;
        }
        while self.fresh.front().is_some_and(|run| !waits(run, false)) {
            self.fresh.pop_front();
        }
        self.fresh.front().copied()
    }
}

#[cfg(test)]
mod tests;
