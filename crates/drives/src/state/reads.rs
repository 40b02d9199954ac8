//! Reads: what a drive is given, when a read is late, and what its end means.

use std::time::Duration;

use super::State;
use crate::backend::{Completion, ReadRequest};
use crate::error::ReadError;
use crate::events::{ReadClass, ReadEvent};
use crate::job::{Failure, Landing, Side};
use crate::layout::{DriveId, ExpertId, FileId};
use crate::notice::Notice;
use crate::page::PAGE_BYTES;
use crate::piece::Piece;
use crate::schedule::{Ask, BarrierId, Decision, JobId};

/// A read is late when it takes this many times as long as is expected. Then its piece is read from another home too, if there is
/// one and a slot is free: the first to land counts.
pub const LATE_FACTOR: u64 = 10;

/// A read is not late before this time in nanoseconds: healthy devices pause for tens of milliseconds now and then.
pub const LATE_FLOOR_NS: u64 = 50_000_000;

/// A drive is out after this many failed reads in a row.
pub const FAILURES_OUT: u32 = 4;

/// After this time a drive that leaves work to others looks again whether they do it.
const LOOK_AGAIN: Duration = Duration::from_millis(1);

#[derive(Debug)]
pub(super) struct Flight {
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
    /// Bytes that its drive had to read when it was issued, its own among them.
    ahead: u64,
    /// From when on the read counts as late, and whether another drive could then read the piece.
    late_ns: u64,
    contestable: bool,
}

/// From when on a read is late that should take `expected` nanoseconds.
fn late_ns(issued_ns: u64, expected: f64) -> u64 {
    let limit = (expected as u64).saturating_mul(LATE_FACTOR).max(LATE_FLOOR_NS);
    issued_ns.saturating_add(limit)
}

impl State {
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
        let hint_chunk = (limits.chunk / limits.depth).next_multiple_of(PAGE_BYTES);
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
        if now_ns < self.soonest_late_ns || self.out.contains(drive) {
            return None;
        }
        self.expect_later(now_ns);
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
        let late_ns = late_ns(now_ns, self.outlook.alone(place, piece.len as u64));
        self.paces[place].issue(piece.len as u64, now_ns);
        let extent = self.layout.extents(job.expert)?[piece.extent as usize];
        let contestable = side == Side::First && piece.holders(&self.layout, job.expert, &tried).len() > 1;
        if contestable {
            self.soonest_late_ns = self.soonest_late_ns.min(late_ns);
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
            ahead: self.paces[place].queued(),
            late_ns,
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
        let late = if self.soonest_late_ns > now_ns {
            self.soonest_late_ns
        } else {
            // Some are late already and wait for a slot or a drive, which is an event by itself.
            self.late_times()
                .filter(|&late_ns| late_ns > now_ns)
                .min()
                .unwrap_or(u64::MAX)
        };
        let late = (late < u64::MAX).then(|| Duration::from_nanos(late - now_ns));
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

    /// Looks again at reads that were expected earlier: their drive may be slower than it was thought to be.
    fn expect_later(&mut self, now_ns: u64) {
        for flight in self.tickets.values_mut().filter(|flight| flight.late_ns <= now_ns) {
            let expected = flight.ahead as f64 / self.outlook.rate(flight.drive.index());
            flight.late_ns = flight.late_ns.max(late_ns(flight.issued_ns, expected));
        }
        self.soonest_late_ns = self.late_times().min().unwrap_or(u64::MAX);
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
