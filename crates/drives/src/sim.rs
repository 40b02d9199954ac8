//! Drives that exist only as a model: seeded, in virtual time, on one thread, so that all that happens can be repeated.
//!
//! A drive serves its reads in turn at its rate; the time to reach the data is hidden behind the read before, if there is one.
//! Reads fail, end early, come late or come changed, whole drives pause, slow down or vanish, as a seed or a [`SimControl`] says.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use std::time::Duration;

use rustix::io::Errno;

use crate::backend::{Backend, Completion, ReadRequest};
use crate::clock::{Clock, VirtualClock};
use crate::error::ReadError;
use crate::layout::{DriveId, FileId, Layout};
use crate::memory::Bell;

/// Numbers that look random and follow from a seed (SplitMix64: Steele, Lea and Flood, 2014).
#[derive(Debug, Clone)]
pub struct SimRandom {
    state: u64,
}

impl SimRandom {
    /// The numbers of a seed.
    pub fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// Any number.
    pub fn number(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.state)
    }

    /// A number below `end`; 0 when `end` is 0.
    pub fn below(&mut self, end: u64) -> u64 {
        ((u128::from(self.number()) * u128::from(end)) >> 64) as u64
    }

    /// A number from 0 up to 1, without 1.
    pub fn fraction(&mut self) -> f64 {
        (self.number() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// True with this probability.
    pub fn chance(&mut self, probability: f64) -> bool {
        self.fraction() < probability
    }
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Fills `bytes` with what lies from `offset` on in an endless sequence that belongs to `origin`: contents of files that need not
/// be stored to be checked. No two pages are alike.
pub fn sim_bytes(origin: u64, offset: u64, bytes: &mut [u8]) {
    let key = mix(origin.wrapping_add(1));
    let mut at = offset;
    let mut rest = bytes;
    while !rest.is_empty() {
        let word = mix(key ^ (at / 8)).to_le_bytes();
        let skip = (at % 8) as usize;
        let count = rest.len().min(8 - skip);
        let (now, later) = std::mem::take(&mut rest).split_at_mut(count);
        now.copy_from_slice(&word[skip..skip + count]);
        at += count as u64;
        rest = later;
    }
}

/// A drive's behaviour.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SimDrive {
    /// Bytes a second.
    pub rate: u64,
    /// Reads that it takes at once.
    pub depth: usize,
    /// Time to reach the data of a read, in nanoseconds.
    pub latency_ns: u64,
    /// Mean of what is added to it, distributed exponentially.
    pub latency_tail_ns: u64,
    /// The time of each read varies by up to this part.
    pub jitter: f64,
    /// What goes wrong.
    pub faults: SimFaults,
}

impl Default for SimDrive {
    /// A sound drive of 7 GB/s, at once where the data is.
    fn default() -> Self {
        Self {
            rate: 7_000_000_000,
            depth: 4,
            latency_ns: 0,
            latency_tail_ns: 0,
            jitter: 0.0,
            faults: SimFaults::default(),
        }
    }
}

/// How often reads of a drive go wrong: probabilities from 0 to 1.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct SimFaults {
    /// The device reports an error, and what the window holds is garbage.
    pub error: f64,
    /// The file seems to end early.
    pub short: f64,
    /// One bit is wrong, and nobody says so.
    pub corrupt: f64,
    /// The read comes later by [`stall_ns`](Self::stall_ns) than it was served. Others pass it.
    pub stall: f64,
    /// The drive does nothing for [`stall_ns`](Self::stall_ns) before it serves the read.
    pub pause: f64,
    /// Length of stalls and pauses in nanoseconds.
    pub stall_ns: u64,
}

/// One drive's line of reads: when each will have been served.
#[derive(Debug, Clone)]
pub struct SimServer {
    drive: SimDrive,
    random: SimRandom,
    free_ns: u64,
    gone: bool,
}

impl SimServer {
    /// A drive that has nothing to do.
    pub fn new(drive: SimDrive, seed: u64) -> Self {
        Self {
            drive,
            random: SimRandom::new(seed),
            free_ns: 0,
            gone: false,
        }
    }

    /// Puts a read of `bytes`, issued now, into the line. Returns when it lands, in nanoseconds.
    pub fn serve(&mut self, now_ns: u64, bytes: u64) -> u64 {
        let drive = &self.drive;
        let tail = match drive.latency_tail_ns {
            0 => 0.0,
            mean => -(1.0 - self.random.fraction()).ln() * mean as f64,
        };
        let reached = now_ns + drive.latency_ns + tail as u64;
        let mut start = reached.max(self.free_ns);
        if drive.faults.pause > 0.0 && self.random.chance(drive.faults.pause) {
            start += drive.faults.stall_ns;
        }
        let factor = match drive.jitter {
            0.0 => 1.0,
            part => 1.0 + part * (2.0 * self.random.fraction() - 1.0),
        };
        let ns = bytes as f64 * 1e9 / drive.rate.max(1) as f64 * factor;
        self.free_ns = start + ns.ceil() as u64;
        let stalled = drive.faults.stall > 0.0 && self.random.chance(drive.faults.stall);
        self.free_ns + if stalled { drive.faults.stall_ns } else { 0 }
    }

    /// Changes the rate for reads to come, in bytes a second.
    pub fn set_rate(&mut self, rate: u64) {
        self.drive.rate = rate;
    }
}

/// Changes what the drives of a [`SimBackend`] do while a streamer owns it.
#[derive(Debug, Clone)]
pub struct SimControl {
    servers: Arc<Mutex<Vec<SimServer>>>,
}

impl SimControl {
    /// Changes a drive's rate for reads to come, in bytes a second.
    pub fn set_rate(&self, drive: DriveId, rate: u64) {
        self.lock()[drive.index()].set_rate(rate);
    }

    /// Changes what goes wrong with a drive's reads to come.
    pub fn set_faults(&self, drive: DriveId, faults: SimFaults) {
        self.lock()[drive.index()].drive.faults = faults;
    }

    /// The drive is gone: reads that have not landed fail.
    pub fn vanish(&self, drive: DriveId) {
        self.lock()[drive.index()].gone = true;
    }

    /// The drive is there again.
    pub fn come_back(&self, drive: DriveId) {
        self.lock()[drive.index()].gone = false;
    }

    fn lock(&self) -> MutexGuard<'_, Vec<SimServer>> {
        self.servers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Writes a file's bytes from an offset on.
type Contents = Box<dyn Fn(FileId, u64, &mut [u8]) + Send>;

/// Serves a layout's files from modelled drives.
///
/// Bytes are written when a read lands and not before. It panics when two reads in flight may write to the same bytes.
pub struct SimBackend {
    layout: Arc<Layout>,
    contents: Option<Contents>,
    depths: Vec<usize>,
    control: SimControl,
    clock: Arc<VirtualClock>,
    random: SimRandom,
    submitted: u64,
    /// Landing time and number of the reads in flight.
    due: BinaryHeap<Reverse<(u64, u64)>>,
    flying: BTreeMap<u64, ReadRequest>,
    /// Where they write, by start, in bytes of the arena.
    targets: BTreeMap<usize, usize>,
    bell: Arc<Bell>,
}

impl SimBackend {
    /// A back end whose drives, in the layout's order, behave like `drives`; the last one stands for all further ones.
    ///
    /// It delivers what `contents` writes for a file and offset. Without contents it writes nothing: for questions of time alone.
    pub fn new(
        layout: Arc<Layout>,
        drives: &[SimDrive],
        contents: Option<Contents>,
        clock: Arc<VirtualClock>,
        seed: u64,
    ) -> Self {
        let mut random = SimRandom::new(seed);
        let drive = |place: usize| drives.get(place).or(drives.last()).copied().unwrap_or_default();
        let places = 0..layout.drives().len();
        let servers = places
            .clone()
            .map(|place| SimServer::new(drive(place), random.number()))
            .collect();
        Self {
            depths: places.map(|place| drive(place).depth.max(1)).collect(),
            layout,
            contents,
            control: SimControl {
                servers: Arc::new(Mutex::new(servers)),
            },
            clock,
            random,
            submitted: 0,
            due: BinaryHeap::new(),
            flying: BTreeMap::new(),
            targets: BTreeMap::new(),
            bell: Arc::default(),
        }
    }

    /// A handle that stays when a streamer owns the back end.
    pub fn control(&self) -> SimControl {
        self.control.clone()
    }

    fn occupy(&mut self, start: usize, len: usize) {
        let before = self.targets.range(..start + len).next_back();
        let overlap = before.is_some_and(|(other, len)| other + len > start);
        assert!(!overlap, "two reads in flight write to the same bytes");
        self.targets.insert(start, len);
    }

    fn land(&mut self, mut read: ReadRequest) -> Completion {
        let (gone, faults) = {
            let server = &self.control.lock()[read.drive.index()];
            (server.gone, server.drive.faults)
        };
        self.targets.remove(&read.window.arena_offset());
        let file = &self.layout.files()[read.file.index()];
        let there = (file.len.saturating_sub(read.offset)).min(read.window.len() as u64) as usize;
        let (got, errno) = if gone {
            (0, Some(Errno::NODEV))
        } else if self.random.chance(faults.error) {
            let spoilt = self.random.below(read.window.len() as u64 + 1) as usize;
            if self.contents.is_some() {
                read.window.bytes_mut()[..spoilt].fill(0xEE);
            }
            (0, Some(Errno::IO))
        } else if self.random.chance(faults.short) {
            (self.random.below(read.wanted as u64) as usize, None)
        } else {
            (there, None)
        };
        if let Some(contents) = &self.contents
            && got > 0
        {
            contents(read.file, read.offset, &mut read.window.bytes_mut()[..got]);
            if self.random.chance(faults.corrupt) {
                let bit = self.random.below(got as u64 * 8);
                read.window.bytes_mut()[(bit / 8) as usize] ^= 1 << (bit % 8);
            }
        }
        let outcome = if got >= read.wanted {
            Ok(())
        } else {
            Err(ReadError {
                path: file.path.clone(),
                offset: read.offset,
                wanted: read.wanted as u64,
                got: got as u64,
                errno: errno.map(Errno::raw_os_error),
            })
        };
        Completion {
            ticket: read.ticket,
            window: read.window,
            landed_ns: self.clock.now_ns(),
            outcome,
        }
    }
}

impl Backend for SimBackend {
    fn depth(&self, drive: DriveId) -> usize {
        self.depths[drive.index()]
    }

    fn submit(&mut self, read: ReadRequest) {
        self.occupy(read.window.arena_offset(), read.window.len());
        let number = self.submitted;
        self.submitted += 1;
        let bytes = read.window.len() as u64;
        let due = self.control.lock()[read.drive.index()].serve(self.clock.now_ns(), bytes);
        self.due.push(Reverse((due, number)));
        self.flying.insert(number, read);
    }

    fn wait(&mut self, done: &mut Vec<Completion>) {
        let Some(Reverse((due, number))) = self.due.pop() else {
            return self.bell.wait();
        };
        self.clock.advance_to(due);
        if let Some(read) = self.flying.remove(&number) {
            let completion = self.land(read);
            done.push(completion);
        }
    }

    fn wait_at_most(&mut self, limit: Duration, done: &mut Vec<Completion>) {
        let end = self.clock.now_ns().saturating_add(limit.as_nanos() as u64);
        match self.due.peek() {
            Some(&Reverse((due, _))) if due <= end => self.wait(done),
            _ => self.clock.advance_to(end),
        }
    }

    fn waker(&self) -> Waker {
        Arc::clone(&self.bell).into()
    }
}

impl fmt::Debug for SimBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimBackend")
            .field("depths", &self.depths)
            .field("submitted", &self.submitted)
            .field("in_flight", &self.flying.len())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contents_are_the_same_however_they_are_read() {
        let mut whole = [0; 300];
        sim_bytes(7, 1000, &mut whole);
        for (from, to) in [(0, 1), (3, 250), (13, 13), (299, 300)] {
            let mut part = vec![0; to - from];
            sim_bytes(7, 1000 + from as u64, &mut part);
            assert_eq!(part, whole[from..to]);
        }
        let mut other = [0; 300];
        sim_bytes(8, 1000, &mut other);
        assert_ne!(other, whole);
    }

    #[test]
    fn random_numbers_follow_from_the_seed_and_fill_their_range() {
        let draw = |seed| {
            let mut random = SimRandom::new(seed);
            (0..1000).map(|_| random.below(10)).collect::<Vec<_>>()
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
        assert!((0..10).all(|digit| (60..140).contains(&draw(3).iter().filter(|&&n| n == digit).count())));
        let mut random = SimRandom::new(4);
        let mean = (0..10_000).map(|_| random.fraction()).sum::<f64>() / 10_000.0;
        assert!((mean - 0.5).abs() < 0.02);
    }

    #[test]
    fn reads_are_served_in_turn_and_hide_latency() {
        let drive = SimDrive {
            rate: 1_000_000_000,
            latency_ns: 100,
            ..SimDrive::default()
        };
        let mut server = SimServer::new(drive, 0);
        assert_eq!(server.serve(0, 1000), 1100);
        assert_eq!(server.serve(0, 1000), 2100);
        assert_eq!(server.serve(2050, 1000), 3150);
        server.set_rate(500_000_000);
        assert_eq!(server.serve(5000, 1000), 7100);
        let jittery = SimDrive { jitter: 0.15, ..drive };
        let mut server = SimServer::new(jittery, 1);
        let times: Vec<u64> = (1..100u64)
            .map(|n| server.serve(n * 10_000, 1000) - n * 10_000 - 100)
            .collect();
        assert!(times.iter().all(|ns| (850..=1150).contains(ns)));
        assert!(times.iter().any(|ns| *ns < 900) && times.iter().any(|ns| *ns > 1100));
    }
}
