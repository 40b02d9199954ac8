//! What was read, when, from where: one event a read.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use crate::layout::{DriveId, ExpertId};

/// Events that are kept. An event takes 80 bytes; a token of Kimi K3 makes about 7,400 of them.
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
    /// When the expert was demanded or hinted, whichever came first, in nanoseconds of the injected clock, as are the other times.
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
    /// Why it was read, when the read was issued: a demand may come after a hint.
    pub class: ReadClass,
    /// The number of the barrier or set of hints that the expert belonged to when the read ended.
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

/// A streamer's read events, apart from the streamer.
#[derive(Debug, Clone)]
pub struct EventFeed {
    ring: Arc<EventRing>,
}

impl EventFeed {
    pub(crate) fn new(ring: Arc<EventRing>) -> Self {
        Self { ring }
    }

    /// As [`Streamer::events`](crate::Streamer::events).
    pub fn since(&self, from: u64) -> EventBatch {
        self.ring.since(from)
    }
}

/// The last events, in memory of fixed size. One thread writes, any number read, and nobody waits for anybody.
///
/// A place holds the words of an event and a sequence number, which is odd while the words change and tells the event's number
/// otherwise. A reader takes the words only if the number was the right one before and after.
#[derive(Debug)]
pub(crate) struct EventRing {
    places: Box<[Place]>,
    /// Number of events ever pushed; event `i` is at place `i % places.len()`.
    count: AtomicU64,
}

/// Words of an encoded event.
const WORDS: usize = 9;

#[derive(Debug, Default)]
struct Place {
    /// 0 while empty, `2 i + 1` while event `i` is written, `2 i + 2` once it is there.
    sequence: AtomicU64,
    words: [AtomicU64; WORDS],
}

impl EventRing {
    pub(crate) fn new(capacity: usize) -> Self {
        Self {
            places: (0..capacity).map(|_| Place::default()).collect(),
            count: AtomicU64::new(0),
        }
    }

    fn place(&self, number: u64) -> &Place {
        &self.places[(number % self.places.len() as u64) as usize]
    }

    /// Adds an event. Only one thread at a time may call it; two would spoil events, but no memory.
    pub(crate) fn push(&self, event: &ReadEvent) {
        let number = self.count.load(Ordering::Relaxed);
        let place = self.place(number);
        place.sequence.store(2 * number + 1, Ordering::Relaxed);
        // No word is seen before the odd number; the even one is not seen before the words.
        fence(Ordering::Release);
        for (word, value) in place.words.iter().zip(event.encode()) {
            word.store(value, Ordering::Relaxed);
        }
        place.sequence.store(2 * number + 2, Ordering::Release);
        self.count.store(number + 1, Ordering::Release);
    }

    fn read(&self, number: u64) -> Option<ReadEvent> {
        let place = self.place(number);
        if place.sequence.load(Ordering::Acquire) != 2 * number + 2 {
            return None;
        }
        let words = place.words.each_ref().map(|word| word.load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        (place.sequence.load(Ordering::Relaxed) == 2 * number + 2).then(|| ReadEvent::decode(words))
    }

    pub(crate) fn since(&self, from: u64) -> EventBatch {
        let count = self.count.load(Ordering::Acquire);
        let oldest = count.saturating_sub(self.places.len() as u64);
        let mut batch = EventBatch {
            first: from.clamp(oldest, count),
            events: Vec::new(),
        };
        batch.events.reserve((count - batch.first) as usize);
        for number in batch.first..count {
            match self.read(number) {
                Some(event) => batch.events.push(event),
                // Overwritten meanwhile, and with it all before.
                None => {
                    batch.events.clear();
                    batch.first = number + 1;
                }
            }
        }
        batch
    }
}

impl ReadEvent {
    fn encode(&self) -> [u64; WORDS] {
        let flags = u64::from(self.class == ReadClass::Hint) | u64::from(self.ok) << 1;
        [
            self.asked_ns,
            self.issued_ns,
            self.landed_ns,
            u64::from(self.expert.layer) << 32 | u64::from(self.expert.expert),
            u64::from(self.extent) << 32 | (self.drive.index() as u64) << 2 | flags,
            self.start,
            self.bytes,
            self.device_bytes,
            self.barrier,
        ]
    }

    fn decode(words: [u64; WORDS]) -> Self {
        let [
            asked_ns,
            issued_ns,
            landed_ns,
            expert,
            kind,
            start,
            bytes,
            device_bytes,
            barrier,
        ] = words;
        Self {
            asked_ns,
            issued_ns,
            landed_ns,
            drive: DriveId::at((kind as u32 >> 2) as usize),
            expert: ExpertId {
                layer: (expert >> 32) as u32,
                expert: expert as u32,
            },
            extent: (kind >> 32) as u32,
            start,
            bytes,
            device_bytes,
            class: if kind & 1 == 1 {
                ReadClass::Hint
            } else {
                ReadClass::Demand
            },
            barrier,
            ok: kind >> 1 & 1 == 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An event all of whose fields follow from a number.
    fn event(n: u64) -> ReadEvent {
        ReadEvent {
            asked_ns: n * 3,
            issued_ns: n * 5,
            landed_ns: n * 7,
            drive: DriveId::at((n % 64) as usize),
            expert: ExpertId {
                layer: n as u32 * 11,
                expert: n as u32 * 13,
            },
            extent: n as u32 * 17,
            start: n,
            bytes: n * 19,
            device_bytes: n * 23,
            class: if n.is_multiple_of(2) {
                ReadClass::Demand
            } else {
                ReadClass::Hint
            },
            barrier: n * 31,
            ok: n.is_multiple_of(3),
        }
    }

    #[test]
    fn the_ring_keeps_the_last_and_says_what_is_lost() {
        assert!(size_of::<Place>() <= 80);
        let ring = EventRing::new(4);
        assert!(ring.since(0).events.is_empty());
        for start in 0..3 {
            ring.push(&event(start));
        }
        assert_eq!(ring.since(1).events, [event(1), event(2)]);
        for start in 3..10 {
            ring.push(&event(start));
        }
        let batch = ring.since(0);
        assert_eq!((batch.first, batch.next()), (6, 10));
        assert_eq!(batch.events, [6, 7, 8, 9].map(event));
        assert!(ring.since(99).events.is_empty());
    }

    #[test]
    fn readers_see_whole_events_in_order_while_one_writes() {
        const EVENTS: u64 = 200_000;
        let ring = EventRing::new(8);
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let (mut next, mut seen) = (0, 0u64);
                while next < EVENTS {
                    let batch = ring.since(next);
                    assert!(batch.first >= next);
                    for (number, found) in (batch.first..).zip(&batch.events) {
                        assert_eq!(*found, event(number));
                        seen += 1;
                    }
                    next = batch.next();
                }
                seen
            });
            for number in 0..EVENTS {
                ring.push(&event(number));
            }
            assert!(reader.join().unwrap() > 0);
        });
    }
}
