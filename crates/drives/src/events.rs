//! What was read, when, from where: one event a read, and sums.

use crate::layout::{DriveId, ExpertId};

/// Events that are kept. An event is 96 bytes; a token of Kimi K3 makes about 7,400 of them.
pub const EVENT_CAPACITY: usize = 16_384;

/// Why something is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReadClass {
    /// A barrier waits for it.
    Demand,
    /// A guess that a barrier will.
    Hint,
}

/// One read, told after it ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadEvent {
    /// When the expert was demanded, in nanoseconds of the injected clock, as are the other times.
    pub asked_ns: u64,
    /// When the read was given to the back end.
    pub issued_ns: u64,
    /// When it ended.
    pub landed_ns: u64,
    /// The drive that was read.
    pub drive: DriveId,
    /// The expert that was read.
    pub expert: ExpertId,
    /// The extent of the expert.
    pub extent: u32,
    /// First byte of the extent in this read.
    pub start: u64,
    /// Bytes of the extent in this read.
    pub bytes: u64,
    /// Bytes of the whole pages that were read.
    pub device_bytes: u64,
    /// Why it was read.
    pub class: ReadClass,
    /// The number of the barrier that asked.
    pub barrier: u64,
    /// Whether all bytes arrived.
    pub ok: bool,
}

/// Events from a point on, as [`Streamer::events`](crate::Streamer::events) gives them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventBatch {
    /// Number of the first event here, counted from the streamer's start. If it is larger than the number that was asked for,
    /// the events between were overwritten.
    pub first: u64,
    /// The events, by the time at which their ends were noticed.
    pub events: Vec<ReadEvent>,
}

impl EventBatch {
    /// What to ask for next time.
    pub fn next(&self) -> u64 {
        self.first + self.events.len() as u64
    }
}

/// The last events, in memory of fixed size.
#[derive(Debug)]
pub(crate) struct EventRing {
    events: Vec<ReadEvent>,
    capacity: usize,
    /// Number of events ever pushed; event `i` is at place `i % capacity`.
    count: u64,
}

impl EventRing {
    pub(crate) fn new(capacity: usize) -> Self {
        Self {
            events: Vec::with_capacity(capacity),
            capacity,
            count: 0,
        }
    }

    pub(crate) fn push(&mut self, event: ReadEvent) {
        let place = (self.count % self.capacity as u64) as usize;
        if place == self.events.len() {
            self.events.push(event);
        } else {
            self.events[place] = event;
        }
        self.count += 1;
    }

    pub(crate) fn since(&self, from: u64) -> EventBatch {
        let oldest = self.count - self.events.len() as u64;
        let first = from.clamp(oldest, self.count);
        let at = |number: u64| self.events[(number % self.capacity as u64) as usize];
        EventBatch {
            first,
            events: (first..self.count).map(at).collect(),
        }
    }
}

/// Sums over a streamer's life. Bytes count once all bytes of a read have arrived.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Experts that landed whole.
    pub experts_read: u64,
    /// Reads that ended well.
    pub reads: u64,
    /// Reads that failed.
    pub failed_reads: u64,
    /// Bytes of experts that were asked for and read.
    pub expert_bytes_read: u64,
    /// The same, widened to whole pages: what the devices delivered.
    pub device_bytes: u64,
    /// Of [`device_bytes`](Self::device_bytes), those of experts that nobody took: their barrier failed or was dropped.
    pub wasted_device_bytes: u64,
    /// Answers of the back end to reads that were not in flight. Not 0 means that the back end is wrong.
    pub stray_completions: u64,
}

/// Sums of one drive.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DriveCounters {
    /// Reads that ended well.
    pub reads: u64,
    /// Bytes of experts read.
    pub bytes: u64,
    /// The same, widened to whole pages.
    pub device_bytes: u64,
    /// Nanoseconds with at least one read in flight.
    pub busy_ns: u64,
    /// Reads in flight now.
    pub in_flight: usize,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::LayoutBuilder;

    fn event(start: u64) -> ReadEvent {
        ReadEvent {
            asked_ns: 0,
            issued_ns: 0,
            landed_ns: 0,
            drive: LayoutBuilder::new().virtual_drive("d"),
            expert: ExpertId { layer: 0, expert: 0 },
            extent: 0,
            start,
            bytes: 1,
            device_bytes: 4096,
            class: ReadClass::Demand,
            barrier: 0,
            ok: true,
        }
    }

    #[test]
    fn the_ring_keeps_the_last_and_says_what_is_lost() {
        assert!(size_of::<ReadEvent>() <= 96);
        let mut ring = EventRing::new(4);
        assert!(ring.since(0).events.is_empty());
        for start in 0..3 {
            ring.push(event(start));
        }
        assert_eq!(ring.since(1).events, [event(1), event(2)]);
        for start in 3..10 {
            ring.push(event(start));
        }
        let batch = ring.since(0);
        assert_eq!((batch.first, batch.next()), (6, 10));
        let starts: Vec<u64> = batch.events.iter().map(|event| event.start).collect();
        assert_eq!(starts, [6, 7, 8, 9]);
        assert!(ring.since(99).events.is_empty());
    }
}
