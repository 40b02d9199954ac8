//! The memory that experts land in: one mapping of fixed size, cut into equal slots.
//!
//! A slot is owned by exactly one value at a time: the free list, a [`Slot`] that is being filled, or a [`SlotLease`]. While it is
//! filled, reads own disjoint [`Window`]s of it; a lease can be made only once every window is back. So no read can write into
//! bytes that somebody sees, and a slot whose reads are still in flight cannot be given to another expert.

use std::fmt;
use std::ops::Range;
use std::slice;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Waker;

use memmap2::MmapRaw;

use crate::error::{Error, Result};
use crate::map::{AlignedMap, HugePages};
use crate::page::PAGE_BYTES;

/// Memory of fixed size for experts, taken at start and divided into equal page-aligned slots. One slot holds one expert.
pub struct Arena {
    map: MmapRaw,
    base: usize,
    slot_bytes: usize,
    slots: usize,
    huge: HugePages,
    free: Mutex<Vec<usize>>,
    releases: AtomicU64,
    taker: Mutex<Option<Waker>>,
}

impl Arena {
    /// Maps as many slots of `slot_bytes` (see [`Layout::slot_bytes`](crate::Layout::slot_bytes)) as fit in `bytes`.
    ///
    /// # Errors
    ///
    /// [`Error::ArenaTooSmall`] when not one slot fits, [`Error::Map`] when the memory cannot be mapped.
    pub fn new(bytes: usize, slot_bytes: usize) -> Result<Arc<Self>> {
        let too_small = |needed| Error::ArenaTooSmall {
            arena_bytes: bytes,
            slot_bytes,
            needed,
        };
        let whole = slot_bytes
            .checked_next_multiple_of(PAGE_BYTES)
            .filter(|&whole| whole > 0)
            .ok_or_else(|| too_small(PAGE_BYTES))?;
        let slots = bytes / whole;
        if slots == 0 {
            return Err(too_small(whole));
        }
        let memory = AlignedMap::new(slots * whole)?;
        Ok(Arc::new(Self {
            map: memory.map.into(),
            base: memory.start,
            slot_bytes: whole,
            slots,
            huge: memory.huge,
            free: Mutex::new((0..slots).rev().collect()),
            releases: AtomicU64::new(0),
            taker: Mutex::new(None),
        }))
    }

    /// Number of slots.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// Bytes of a slot.
    pub fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    /// Bytes of all slots: more than this is never resident.
    pub fn bytes(&self) -> usize {
        self.slots * self.slot_bytes
    }

    /// Slots that nobody holds.
    pub fn free_slots(&self) -> usize {
        self.free_list().len()
    }

    /// Whether the memory asks for huge pages.
    pub fn huge_pages(&self) -> &HugePages {
        &self.huge
    }

    /// The first byte of the first slot, for back ends that register the arena with the kernel. It is followed by
    /// [`bytes`](Self::bytes) bytes that stay mapped as long as the arena lives.
    pub fn as_ptr(&self) -> *const u8 {
        self.map.as_ptr().wrapping_add(self.base)
    }

    /// Takes a free slot.
    pub(crate) fn take(self: &Arc<Self>) -> Option<Slot> {
        let index = self.free_list().pop()?;
        Some(Slot {
            arena: Arc::clone(self),
            index,
            lent: Vec::new(),
        })
    }

    /// How many slots were given back so far.
    pub(crate) fn releases(&self) -> u64 {
        self.releases.load(Ordering::Acquire)
    }

    /// Makes one streamer the only taker of slots, woken when a slot is given back. False when another one is.
    pub(crate) fn attach(&self, waker: Waker) -> bool {
        let mut taker = self.taker.lock().unwrap_or_else(PoisonError::into_inner);
        if taker.is_some() {
            return false;
        }
        *taker = Some(waker);
        true
    }

    /// Ends what [`attach`](Self::attach) began.
    pub(crate) fn detach(&self) {
        *self.taker.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    fn release(&self, index: usize) {
        self.free_list().push(index);
        self.releases.fetch_add(1, Ordering::AcqRel);
        let waker = self.taker.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    fn free_list(&self) -> std::sync::MutexGuard<'_, Vec<usize>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Address of byte `start` of a slot.
    fn address(&self, slot: usize, start: usize) -> *mut u8 {
        self.map
            .as_mut_ptr()
            .wrapping_add(self.base + slot * self.slot_bytes + start)
    }

    /// The bytes of a range of a slot.
    ///
    /// # Safety
    ///
    /// `slot < slots`, `range` lies inside the slot, and nobody writes to it while the result lives.
    unsafe fn bytes_of(&self, slot: usize, range: &Range<usize>) -> &[u8] {
        // SAFETY: the range lies inside the mapping, which lives as long as `self` and was zeroed by the kernel; the caller
        // promises that nobody writes.
        unsafe { slice::from_raw_parts(self.address(slot, range.start), range.len()) }
    }

    /// The bytes of a range of a slot, to write.
    ///
    /// # Safety
    ///
    /// `slot < slots`, `range` lies inside the slot, and nobody else reads or writes it while the result lives.
    #[expect(clippy::mut_from_ref, reason = "the caller owns the range, not the arena")]
    unsafe fn bytes_of_mut(&self, slot: usize, range: &Range<usize>) -> &mut [u8] {
        // SAFETY: the range lies inside the mapping, which lives as long as `self` and was zeroed by the kernel; the caller
        // promises that nobody else touches it.
        unsafe { slice::from_raw_parts_mut(self.address(slot, range.start), range.len()) }
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arena")
            .field("slots", &self.slots)
            .field("slot_bytes", &self.slot_bytes)
            .field("huge", &self.huge)
            .finish_non_exhaustive()
    }
}

/// A slot that is being filled. Its index is in no free list and in no other `Slot`.
///
/// Dropped with windows still lent, the slot is lost to the arena rather than reused under a read.
#[derive(Debug)]
pub(crate) struct Slot {
    arena: Arc<Arena>,
    index: usize,
    lent: Vec<Range<usize>>,
}

impl Slot {
    /// Lends a range of whole pages to one read.
    ///
    /// # Panics
    ///
    /// When the range is empty, not whole pages, outside the slot, or overlaps a range that is lent.
    pub(crate) fn lend(&mut self, range: Range<usize>) -> Window {
        assert!(
            range.start < range.end
                && range.end <= self.arena.slot_bytes
                && range.start.is_multiple_of(PAGE_BYTES)
                && range.end.is_multiple_of(PAGE_BYTES),
            "a window is whole pages of its slot"
        );
        let overlaps = |other: &Range<usize>| range.start < other.end && other.start < range.end;
        assert!(
            !self.lent.iter().any(overlaps),
            "a window is lent to one read at a time"
        );
        self.lent.push(range.clone());
        Window {
            arena: Arc::clone(&self.arena),
            slot: self.index,
            range,
        }
    }

    /// Takes a window back from its read.
    ///
    /// # Panics
    ///
    /// When the window is not one of this slot.
    pub(crate) fn take_back(&mut self, window: Window) {
        let own = Arc::ptr_eq(&self.arena, &window.arena) && self.index == window.slot;
        let place = self.lent.iter().position(|range| *range == window.range);
        match place {
            Some(place) if own => {
                self.lent.swap_remove(place);
            }
            _ => panic!("a window returns to the slot that lent it"),
        }
    }

    /// Whether no read writes to the slot.
    pub(crate) fn is_still(&self) -> bool {
        self.lent.is_empty()
    }

    /// Copies a range of another slot of the same arena to the same place here.
    ///
    /// # Panics
    ///
    /// When the range lies outside a slot or a read writes to a part of it, here or there.
    pub(crate) fn copy_from(&mut self, other: &Self, range: Range<usize>) {
        let lent = |slot: &Self| {
            slot.lent
                .iter()
                .any(|lent| range.start < lent.end && lent.start < range.end)
        };
        assert!(
            range.start <= range.end
                && range.end <= self.arena.slot_bytes
                && Arc::ptr_eq(&self.arena, &other.arena)
                && !lent(self)
                && !lent(other),
            "only what no read writes to is copied"
        );
        // SAFETY: both slots are in the arena and owned by their `Slot`s, which are two, so the ranges do not overlap. No window
        // on either range is lent, so nobody writes to `other`'s, and nobody else touches `self`'s, which `&mut self` owns.
        unsafe {
            let from = other.arena.bytes_of(other.index, &range);
            self.arena.bytes_of_mut(self.index, &range).copy_from_slice(from);
        }
    }

    /// Turns a filled slot into a lease that shows `extents`, ranges of bytes inside the slot.
    ///
    /// # Panics
    ///
    /// When windows are still lent or an extent lies outside the slot.
    pub(crate) fn into_lease(self, extents: Box<[Range<usize>]>) -> SlotLease {
        assert!(self.lent.is_empty(), "a slot with reads in flight is unseen");
        let inside = |range: &Range<usize>| range.start <= range.end && range.end <= self.arena.slot_bytes;
        assert!(extents.iter().all(inside), "an extent lies inside its slot");
        SlotLease {
            filled: Arc::new(Filled { slot: self, extents }),
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if self.lent.is_empty() {
            self.arena.release(self.index);
        }
    }
}

/// The sole right to write a page-aligned part of a slot: the destination of one read.
///
/// It travels with the read to the back end and comes back with the completion. A back end that drops it instead loses the slot.
#[derive(Debug)]
pub struct Window {
    arena: Arc<Arena>,
    slot: usize,
    range: Range<usize>,
}

impl Window {
    /// Length in bytes, a multiple of [`PAGE_BYTES`].
    #[expect(clippy::len_without_is_empty, reason = "a window is never empty")]
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// The bytes to fill.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: `Slot::lend` checked the range and lends each byte to one window at a time; a lease exists only after
        // `take_back` consumed this window. `&mut self` makes the slice the window's only one.
        unsafe { self.arena.bytes_of_mut(self.slot, &self.range) }
    }

    /// Where the window starts, in bytes from [`Arena::as_ptr`]: for back ends that registered the arena.
    pub fn arena_offset(&self) -> usize {
        self.slot * self.arena.slot_bytes + self.range.start
    }
}

/// A slot that nobody writes to any more.
#[derive(Debug)]
struct Filled {
    slot: Slot,
    extents: Box<[Range<usize>]>,
}

/// Read access to an expert that has landed. The slot goes back when the last clone is dropped.
///
/// It may be sent to and shared between threads.
#[derive(Debug, Clone)]
pub struct SlotLease {
    filled: Arc<Filled>,
}

impl SlotLease {
    /// Number of extents, as in the layout.
    pub fn extents(&self) -> usize {
        self.filled.extents.len()
    }

    /// Whether there is no other clone of it.
    pub(crate) fn is_only(&self) -> bool {
        Arc::strong_count(&self.filled) == 1
    }

    /// Exactly the bytes of extent `index`, at an address that equals its file offset mod 4096.
    ///
    /// # Panics
    ///
    /// When `index` is not below [`extents`](Self::extents).
    pub fn extent(&self, index: usize) -> &[u8] {
        let Filled { slot, extents } = &*self.filled;
        // SAFETY: `into_lease` checked the range and that no window is lent, and the lease's clones own the slot, so nobody can write.
        unsafe { slot.arena.bytes_of(slot.index, &extents[index]) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arena(slots: usize) -> Arc<Arena> {
        Arena::new(slots * 4 * PAGE_BYTES, 4 * PAGE_BYTES).unwrap()
    }

    #[test]
    fn what_a_window_writes_a_lease_shows() {
        let arena = arena(2);
        let mut slot = arena.take().unwrap();
        let mut first = slot.lend(0..PAGE_BYTES);
        let mut rest = slot.lend(PAGE_BYTES..4 * PAGE_BYTES);
        assert_eq!(rest.arena_offset(), first.arena_offset() + PAGE_BYTES);
        first.bytes_mut().fill(1);
        rest.bytes_mut().fill(2);
        slot.take_back(first);
        slot.take_back(rest);
        let lease = slot.into_lease(Box::new([PAGE_BYTES - 1..PAGE_BYTES + 1, 0..0]));
        assert_eq!(lease.extent(0), [1, 2]);
        assert!(lease.extent(1).is_empty());
        assert_eq!(lease.extents(), 2);
        assert_eq!(arena.free_slots(), 1);
        drop(lease);
        assert_eq!(arena.free_slots(), 2);
    }

    #[test]
    fn slots_are_disjoint_and_taken_once() {
        let arena = arena(3);
        let mut slots: Vec<Slot> = std::iter::from_fn(|| arena.take()).collect();
        assert_eq!(slots.len(), 3);
        let mut windows: Vec<Window> = slots.iter_mut().map(|s| s.lend(0..4 * PAGE_BYTES)).collect();
        for (fill, window) in windows.iter_mut().enumerate() {
            window.bytes_mut().fill(fill as u8);
        }
        for (fill, window) in windows.iter_mut().enumerate() {
            assert!(window.bytes_mut().iter().all(|&byte| byte == fill as u8));
        }
    }

    #[test]
    fn a_slot_dropped_under_a_read_is_never_reused() {
        let arena = arena(1);
        let mut slot = arena.take().unwrap();
        let mut window = slot.lend(0..PAGE_BYTES);
        drop(slot);
        assert!(arena.take().is_none());
        window.bytes_mut().fill(9);
    }

    #[test]
    #[should_panic(expected = "lent to one read at a time")]
    fn overlapping_windows_are_refused() {
        let mut slot = arena(1).take().unwrap();
        let _first = slot.lend(0..2 * PAGE_BYTES);
        let _second = slot.lend(PAGE_BYTES..3 * PAGE_BYTES);
    }

    #[test]
    #[should_panic(expected = "returns to the slot that lent it")]
    fn windows_return_to_their_own_slot() {
        let arena = arena(2);
        let (mut one, mut other) = (arena.take().unwrap(), arena.take().unwrap());
        let _own = other.lend(0..PAGE_BYTES);
        other.take_back(one.lend(0..PAGE_BYTES));
    }

    #[test]
    #[should_panic(expected = "reads in flight is unseen")]
    fn no_lease_while_a_window_is_lent() {
        let mut slot = arena(1).take().unwrap();
        let _window = slot.lend(0..PAGE_BYTES);
        slot.into_lease(Box::new([]));
    }

    #[test]
    fn what_is_copied_between_slots_is_seen() {
        let arena = arena(2);
        let (mut one, mut other) = (arena.take().unwrap(), arena.take().unwrap());
        let mut window = one.lend(PAGE_BYTES..2 * PAGE_BYTES);
        window.bytes_mut().fill(7);
        one.take_back(window);
        // Elsewhere both may be written to meanwhile.
        let _lent = [one.lend(0..PAGE_BYTES), other.lend(2 * PAGE_BYTES..4 * PAGE_BYTES)];
        other.copy_from(&one, PAGE_BYTES..2 * PAGE_BYTES);
        assert!(!other.is_still());
        let mut window = other.lend(PAGE_BYTES..2 * PAGE_BYTES);
        assert!(window.bytes_mut().iter().all(|&byte| byte == 7));
    }

    #[test]
    #[should_panic(expected = "only what no read writes to")]
    fn nothing_is_copied_from_under_a_read() {
        let arena = arena(2);
        let (mut one, mut other) = (arena.take().unwrap(), arena.take().unwrap());
        let _lent = one.lend(PAGE_BYTES..2 * PAGE_BYTES);
        other.copy_from(&one, 0..2 * PAGE_BYTES);
    }

    #[test]
    fn a_lease_crosses_threads() {
        let arena = arena(1);
        let mut slot = arena.take().unwrap();
        let mut window = slot.lend(0..PAGE_BYTES);
        window.bytes_mut()[0] = 5;
        slot.take_back(window);
        let range = 0..1;
        let lease = Arc::new(slot.into_lease(Box::new([range])));
        let other = Arc::clone(&lease);
        std::thread::spawn(move || assert_eq!(other.extent(0), [5]))
            .join()
            .unwrap();
        assert_eq!(lease.extent(0), [5]);
    }

    #[test]
    fn an_arena_without_room_for_one_slot_says_what_would_do() {
        let error = Arena::new(PAGE_BYTES, PAGE_BYTES + 1).unwrap_err();
        assert!(error.to_string().contains("at least 8192 bytes"));
        assert!(Arena::new(PAGE_BYTES, 0).is_err());
    }
}
