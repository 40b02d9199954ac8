//! One expert on its way into memory: its slot, what has landed, and pieces that two reads compete for.
//!
//! A late piece is read again into a *second* slot, since the first read still owns its window of the first. The expert is whole
//! once each piece has landed in one of the two, and is handed out in a slot that no read writes to any more: the first if it
//! can be, else the second, into which the rest is then copied. The other slot is kept aside until its last read has ended.

use std::ops::Range;

use crate::arena::{Slot, Window};
use crate::events::ReadClass;
use crate::layout::{ExpertId, FileId};
use crate::piece::Piece;
use crate::schedule::BarrierId;

/// One of the two slots of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    First,
    Second,
}

/// A piece that was late and is read twice.
#[derive(Debug)]
struct Contest {
    piece: Piece,
    in_flight: u8,
    /// On which sides it has landed.
    landed: [bool; 2],
    tried: Vec<FileId>,
}

/// What the landing of a piece means.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Landing {
    /// It is the first to bring these bytes.
    New,
    /// They had landed before.
    Again,
}

/// What the failure of a piece means.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// Another read has brought these bytes or still may.
    Covered,
    /// Nothing brings them, unless they are read from a file other than these.
    Lost(Vec<FileId>),
}

/// An expert of a barrier or hint, from the time when it is asked for until it has landed whole.
#[derive(Debug)]
pub(crate) struct Job {
    /// The barrier or set of hints that it belongs to now.
    pub(crate) barrier: BarrierId,
    pub(crate) expert: ExpertId,
    pub(crate) class: ReadClass,
    pub(crate) asked_ns: u64,
    /// Bytes of whole pages that have not landed, and that have.
    pub(crate) missing: u64,
    pub(crate) landed: u64,
    pub(crate) in_flight: usize,
    /// Nobody wants it any more: the slots go back once no read writes to them.
    pub(crate) dead: bool,
    slots: [Option<Slot>; 2],
    contests: Vec<Contest>,
}

impl Job {
    pub(crate) fn new(barrier: BarrierId, class: ReadClass, expert: ExpertId, device_bytes: u64, now_ns: u64) -> Self {
        Self {
            barrier,
            expert,
            class,
            asked_ns: now_ns,
            missing: device_bytes,
            landed: 0,
            in_flight: 0,
            dead: false,
            slots: [None, None],
            contests: Vec::new(),
        }
    }

    pub(crate) fn has_slot(&self) -> bool {
        self.slots[0].is_some()
    }

    pub(crate) fn has_second_slot(&self) -> bool {
        self.slots[1].is_some()
    }

    pub(crate) fn give_slot(&mut self, side: Side, slot: Slot) {
        self.slots[side as usize] = Some(slot);
    }

    /// Lends the window of a piece to a read.
    pub(crate) fn lend(&mut self, side: Side, piece: &Piece) -> Option<Window> {
        let slot = self.slots[side as usize].as_mut()?;
        self.in_flight += 1;
        Some(slot.lend(pages(piece)))
    }

    /// Takes the window of a read back.
    pub(crate) fn take_back(&mut self, side: Side, window: Window) {
        if let Some(slot) = &mut self.slots[side as usize] {
            slot.take_back(window);
            self.in_flight -= 1;
        }
    }

    /// Whether a late piece may be read once more. `tried` says which files failed it.
    pub(crate) fn may_contest(&self, piece: &Piece) -> bool {
        self.contest(piece)
            .is_none_or(|contest| contest.in_flight == 1 && contest.landed == [false; 2])
    }

    /// A late piece, read from a first file that `tried` does not name, is read again.
    pub(crate) fn contend(&mut self, piece: Piece, tried: &[FileId]) {
        match self.contests.iter_mut().find(|contest| contest.piece == piece) {
            Some(contest) => contest.in_flight += 1,
            None => self.contests.push(Contest {
                piece,
                in_flight: 2,
                landed: [false; 2],
                tried: tried.to_vec(),
            }),
        }
    }

    /// The files that failed a piece that is read twice; `None` when it is not.
    pub(crate) fn tried(&self, piece: &Piece) -> Option<&[FileId]> {
        self.contest(piece).map(|contest| &contest.tried[..])
    }

    /// A piece has landed.
    pub(crate) fn land(&mut self, side: Side, piece: &Piece) -> Landing {
        if let Some(contest) = self.contests.iter_mut().find(|contest| contest.piece == *piece) {
            contest.in_flight -= 1;
            let again = contest.landed != [false; 2];
            contest.landed[side as usize] = true;
            if again {
                return Landing::Again;
            }
        }
        self.missing -= piece.len as u64;
        self.landed += piece.len as u64;
        Landing::New
    }

    /// A read of a piece from `file` has failed, after the files in `tried`.
    pub(crate) fn fail(&mut self, piece: &Piece, file: FileId, mut tried: Vec<FileId>) -> Failure {
        let Some(place) = self.contests.iter().position(|contest| contest.piece == *piece) else {
            tried.push(file);
            return Failure::Lost(tried);
        };
        let contest = &mut self.contests[place];
        contest.in_flight -= 1;
        contest.tried.push(file);
        if contest.in_flight > 0 || contest.landed != [false; 2] {
            return Failure::Covered;
        }
        Failure::Lost(self.contests.swap_remove(place).tried)
    }

    /// The slot with the whole expert, once there is one that no read writes to. The other one stays.
    pub(crate) fn take_filled(&mut self) -> Option<Slot> {
        if self.missing > 0 {
            return None;
        }
        let still = |slot: &Option<Slot>| slot.as_ref().is_some_and(Slot::is_still);
        let side = self.slots.iter().position(still)?;
        let mut slot = self.slots[side].take()?;
        let other = &self.slots[1 - side];
        for range in self.only_on(1 - side) {
            slot.copy_from(other.as_ref()?, range);
        }
        Some(slot)
    }

    /// The slot that is left after [`take_filled`](Self::take_filled).
    pub(crate) fn into_rest(self) -> Option<Slot> {
        self.slots.into_iter().flatten().next()
    }

    /// Ranges of the slot that have landed on one side and not on the other.
    fn only_on(&self, side: usize) -> Vec<Range<usize>> {
        let contested = |contest: &&Contest| contest.landed[side] && !contest.landed[1 - side];
        if side == Side::Second as usize {
            return self
                .contests
                .iter()
                .filter(contested)
                .map(|contest| pages(&contest.piece))
                .collect();
        }
        // All that was not contested is on the first side alone.
        let mut there: Vec<Range<usize>> = self
            .contests
            .iter()
            .filter(|contest| contest.landed[1 - side])
            .map(|contest| pages(&contest.piece))
            .collect();
        there.sort_unstable_by_key(|range| range.start);
        let (mut from, end) = (0, self.landed as usize);
        let mut gaps = Vec::with_capacity(there.len() + 1);
        for range in there.into_iter().chain(std::iter::once(end..end)) {
            gaps.push(from..range.start);
            from = range.end;
        }
        gaps
    }

    fn contest(&self, piece: &Piece) -> Option<&Contest> {
        self.contests.iter().find(|contest| contest.piece == *piece)
    }
}

fn pages(piece: &Piece) -> Range<usize> {
    piece.slot_start..piece.slot_start + piece.len
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::arena::Arena;
    use crate::page::PAGE_BYTES;

    const PIECES: usize = 3;

    /// A job of three pieces of a page, and an arena of two slots.
    fn job() -> (Arc<Arena>, Job) {
        let arena = Arena::new(2 * PIECES * PAGE_BYTES, PIECES * PAGE_BYTES).unwrap();
        let expert = ExpertId { layer: 0, expert: 0 };
        let device_bytes = (PIECES * PAGE_BYTES) as u64;
        let mut job = Job::new(BarrierId(0), ReadClass::Demand, expert, device_bytes, 0);
        job.give_slot(Side::First, arena.take().unwrap());
        (arena, job)
    }

    fn piece(nth: usize) -> Piece {
        Piece {
            extent: 0,
            slot_start: nth * PAGE_BYTES,
            len: PAGE_BYTES,
            start: (nth * PAGE_BYTES) as u64,
            bytes: PAGE_BYTES as u64,
        }
    }

    /// Lets a read write its piece's number, or garbage, and end.
    fn end(job: &mut Job, side: Side, nth: usize, mut window: Window, ok: bool) -> Option<Landing> {
        window.bytes_mut().fill(if ok { nth as u8 } else { 0xEE });
        job.take_back(side, window);
        ok.then(|| job.land(side, &piece(nth)))
    }

    fn shown(slot: Slot) -> Vec<u8> {
        let range = 0..PIECES * PAGE_BYTES;
        let lease = slot.into_lease(Box::new([range]));
        lease.extent(0).chunks(PAGE_BYTES).map(|page| page[7]).collect()
    }

    fn contend(arena: &Arc<Arena>, job: &mut Job, nth: usize) -> Window {
        assert!(job.may_contest(&piece(nth)));
        if !job.has_second_slot() {
            job.give_slot(Side::Second, arena.take().unwrap());
        }
        job.contend(piece(nth), &[]);
        assert!(!job.may_contest(&piece(nth)), "two reads are enough");
        job.lend(Side::Second, &piece(nth)).unwrap()
    }

    #[test]
    fn the_second_read_wins_and_the_rest_is_copied() {
        let (arena, mut job) = job();
        let windows = [0, 1, 2].map(|nth| job.lend(Side::First, &piece(nth)).unwrap());
        let [first, late, last] = windows;
        assert_eq!(end(&mut job, Side::First, 0, first, true), Some(Landing::New));
        let second = contend(&arena, &mut job, 1);
        assert_eq!(end(&mut job, Side::First, 2, last, true), Some(Landing::New));
        assert!(job.take_filled().is_none());
        assert_eq!(end(&mut job, Side::Second, 1, second, true), Some(Landing::New));
        let filled = job.take_filled().unwrap();
        let mut rest = job.into_rest().unwrap();
        assert!(!rest.is_still(), "the late read still owns its window");
        assert_eq!(shown(filled), [0, 1, 2]);
        rest.take_back(late);
        assert!(rest.is_still());
    }

    #[test]
    fn a_first_slot_that_is_still_is_preferred_and_completed() {
        let (arena, mut job) = job();
        let [first, late, last] = [0, 1, 2].map(|nth| job.lend(Side::First, &piece(nth)).unwrap());
        end(&mut job, Side::First, 0, first, true);
        let second = contend(&arena, &mut job, 1);
        end(&mut job, Side::Second, 1, second, true);
        // The late read ends badly after all: its page is garbage.
        end(&mut job, Side::First, 1, late, false);
        let file = crate::LayoutBuilder::new().virtual_file(crate::layout::DriveId::at(0), "f", 1);
        assert_eq!(job.fail(&piece(1), file, Vec::new()), Failure::Covered);
        end(&mut job, Side::First, 2, last, true);
        assert_eq!(shown(job.take_filled().unwrap()), [0, 1, 2]);
    }

    #[test]
    fn while_reads_write_to_both_slots_nothing_is_handed_out() {
        let (arena, mut job) = job();
        let [one, two, three] = [0, 1, 2].map(|nth| job.lend(Side::First, &piece(nth)).unwrap());
        end(&mut job, Side::First, 0, one, true);
        let (second, third) = (contend(&arena, &mut job, 1), contend(&arena, &mut job, 2));
        assert_eq!(end(&mut job, Side::First, 1, two, true), Some(Landing::New));
        assert_eq!(end(&mut job, Side::Second, 2, third, true), Some(Landing::New));
        assert_eq!(job.missing, 0);
        assert!(job.take_filled().is_none());
        assert_eq!(end(&mut job, Side::Second, 1, second, true), Some(Landing::Again));
        // Piece 2 is on the second side only, the others on the first too.
        assert_eq!(shown(job.take_filled().unwrap()), [0, 1, 2]);
        let mut rest = job.into_rest().unwrap();
        rest.take_back(three);
    }

    #[test]
    fn a_piece_is_lost_when_both_reads_failed() {
        let (arena, mut job) = job();
        let mut builder = crate::LayoutBuilder::new();
        let drive = builder.virtual_drive("d");
        let files = [0, 1, 2].map(|_| builder.virtual_file(drive, "f", 1));
        let late = job.lend(Side::First, &piece(0)).unwrap();
        assert!(job.may_contest(&piece(0)));
        job.give_slot(Side::Second, arena.take().unwrap());
        job.contend(piece(0), &files[..1]);
        let second = job.lend(Side::Second, &piece(0)).unwrap();
        end(&mut job, Side::Second, 0, second, false);
        assert_eq!(job.fail(&piece(0), files[1], Vec::new()), Failure::Covered);
        assert!(job.may_contest(&piece(0)), "it may be tried once more, elsewhere");
        assert_eq!(job.tried(&piece(0)), Some(&files[..2]));
        end(&mut job, Side::First, 0, late, false);
        assert_eq!(job.fail(&piece(0), files[2], Vec::new()), Failure::Lost(files.to_vec()));
        assert_eq!(job.in_flight, 0);
        // Read again, it is a piece like any other.
        assert_eq!(job.fail(&piece(0), files[2], Vec::new()), Failure::Lost(vec![files[2]]));
    }
}
