//! Probes on real drives: reads of the layout's own files at random places among its experts.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::search::{Load, Rig};
use super::{CHUNK_SIZES, DEPTHS, MOST_IN_FLIGHT};
use crate::arena::Arena;
use crate::clock::{Clock, MonotonicClock};
use crate::device::Device;
use crate::error::Result;
use crate::layout::{FileId, Layout};
use crate::notice::Notices;
use crate::open::open_best;
use crate::page::page_floor;
use crate::reads::{RawLanding, RawReads};

/// Reads the drives of a layout.
pub(super) struct DriveRig {
    reads: RawReads,
    layout: Arc<Layout>,
    /// The homes on each drive.
    places: Vec<Vec<Place>>,
    devices: Vec<Device>,
    /// Why a drive could not be read.
    problems: Vec<Option<String>>,
    clock: Arc<MonotonicClock>,
    start: Instant,
    random: u64,
}

/// Bytes of experts in a file.
#[derive(Clone, Copy)]
struct Place {
    file: FileId,
    offset: u64,
    len: u64,
}

/// Landings of one load during a probe.
#[derive(Default)]
struct Tally {
    in_flight: usize,
    /// Time in nanoseconds and bytes.
    landed: Vec<(u64, usize)>,
    failed: bool,
}

impl DriveRig {
    /// Opens the layout's files and takes memory for probes.
    pub(super) fn new(layout: &Arc<Layout>, devices: &[Device], notices: &Notices) -> Result<Self> {
        let deepest = DEPTHS.iter().copied().max().unwrap_or(1);
        let largest = CHUNK_SIZES.iter().copied().max().unwrap_or(MOST_IN_FLIGHT);
        let drives = layout.drives().len();
        let arena = Arena::new(drives.max(1) * deepest * largest, largest)?;
        let clock = Arc::new(MonotonicClock::new());
        let backend = open_best(layout, &arena, &vec![deepest; drives], clock.clone(), notices)?;
        let seed = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(1, |now| now.as_nanos() as u64);
        Ok(Self {
            reads: RawReads::new(backend, Arc::clone(layout), arena),
            layout: Arc::clone(layout),
            places: places(layout),
            devices: devices.to_vec(),
            problems: vec![None; drives],
            clock,
            start: Instant::now(),
            random: seed,
        })
    }

    /// How the reads were made.
    pub(super) fn backend(&self) -> String {
        self.reads.backend().describe()
    }

    /// Why a drive could not be measured, if it was tried.
    pub(super) fn problem(&self, drive: usize) -> Option<String> {
        self.problems[drive].clone()
    }

    /// A number below `end`, from a multiplicative generator (Steele and Vigna 2021, 64 bits).
    fn below(&mut self, end: usize) -> usize {
        self.random = self.random.wrapping_mul(0xd134_2543_de82_ef95).wrapping_add(1);
        ((u128::from(self.random) * end as u128) >> 64) as usize
    }

    /// Starts one read of a load; false when the drive has no file that long, or no memory is free.
    fn start_read(&mut self, load: &Load, places: &[Place]) -> bool {
        if places.is_empty() {
            return false;
        }
        let place = places[self.below(places.len())];
        let within = self.below(usize::try_from(place.len).unwrap_or(usize::MAX)) as u64;
        let last = self.layout.files()[place.file.index()].len - load.chunk as u64;
        let offset = page_floor((place.offset + within).min(last));
        self.reads.start(place.file, offset, load.chunk)
    }

    fn book(&mut self, landing: RawLanding, loads: &[Load], tallies: &mut [Tally]) -> Option<usize> {
        let of = loads.iter().position(|load| load.drive == landing.drive.index())?;
        let tally = &mut tallies[of];
        tally.in_flight -= 1;
        match landing.outcome {
            Ok(_) => tally.landed.push((landing.landed_ns, landing.wanted)),
            Err(error) => {
                tally.failed = true;
                self.problems[landing.drive.index()] = Some(error.to_string());
            }
        }
        (!tally.failed).then_some(of)
    }
}

impl Rig for DriveRig {
    fn drives(&self) -> usize {
        self.places.len()
    }

    fn run(&mut self, loads: &[Load], time: Duration) -> Vec<Option<f64>> {
        let long_enough = |load: &Load| -> Vec<Place> {
            let fits = |place: &&Place| self.layout.files()[place.file.index()].len >= load.chunk as u64;
            self.places[load.drive].iter().filter(fits).copied().collect()
        };
        let places: Vec<Vec<Place>> = loads.iter().map(long_enough).collect();
        let mut tallies: Vec<Tally> = loads.iter().map(|_| Tally::default()).collect();
        let start = Instant::now();
        let began_ns = self.clock.now_ns();
        for (of, load) in loads.iter().enumerate() {
            for _ in 0..load.depth {
                tallies[of].in_flight += usize::from(self.start_read(load, &places[of]));
            }
        }
        let mut landed = Vec::new();
        let mut ended_ns = None;
        while self.reads.in_flight() > 0 {
            self.reads.wait(&mut landed);
            let over = start.elapsed() >= time;
            for landing in landed.drain(..) {
                let of = self.book(landing, loads, &mut tallies);
                if let Some(of) = of.filter(|_| !over) {
                    tallies[of].in_flight += usize::from(self.start_read(&loads[of], &places[of]));
                }
            }
            if over && ended_ns.is_none() {
                ended_ns = Some(self.clock.now_ns());
            }
        }
        let ended_ns = ended_ns.unwrap_or(u64::MAX);
        let rate = |(tally, load): (Tally, &Load)| {
            let rate = rate(&tally.landed, load.depth, began_ns, ended_ns);
            rate.filter(|_| !tally.failed)
        };
        tallies.into_iter().zip(loads).map(rate).collect()
    }

    fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    fn same_disk(&self, a: usize, b: usize) -> bool {
        let (a, b) = (&self.devices[a].disk, &self.devices[b].disk);
        a.is_some() && a == b
    }
}

/// The homes on each drive.
fn places(layout: &Layout) -> Vec<Vec<Place>> {
    let mut places = vec![Vec::new(); layout.drives().len()];
    for &expert in layout.experts() {
        for extent in 0..layout.extents(expert).map_or(0, <[_]>::len) {
            for home in layout.homes(expert, extent).unwrap_or_default() {
                places[layout.drive_of(home).index()].push(Place {
                    file: home.file,
                    offset: home.offset,
                    len: home.len,
                });
            }
        }
    }
    places
}

/// Bytes per second from landings (time, bytes) of a probe that kept `depth` reads in flight from `began_ns` to `ended_ns`.
///
/// The first fill is left out, as it says more about latency than about the rate, and so is what landed after the end, when less
/// was in flight. When too little is left, everything counts.
fn rate(landed: &[(u64, usize)], depth: usize, began_ns: u64, ended_ns: u64) -> Option<f64> {
    let mut landed = landed.to_vec();
    landed.sort_unstable();
    let steady: Vec<_> = landed.iter().filter(|(at, _)| *at <= ended_ns).collect();
    let per_second = |bytes: usize, from: u64, to: u64| bytes as f64 / (to - from).max(1) as f64 * 1e9;
    if let (Some((first, _)), Some((last, _))) = (steady.get(depth - 1), steady.last())
        && steady.len() >= 2 * depth
        && last > first
    {
        let counted = steady.iter().filter(|(at, _)| at > first);
        return Some(per_second(counted.map(|(_, bytes)| bytes).sum(), *first, *last));
    }
    let (last, _) = landed.last()?;
    let bytes = landed.iter().map(|(_, bytes)| bytes).sum();
    Some(per_second(bytes, began_ns.min(*last), *last))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_leaves_out_the_first_fill_and_the_end() {
        // Two in flight: a slow start, then 100 bytes each 10 ns, then a late one.
        let steady: Vec<_> = (0..10)
            .map(|read| (1000 + 10 * read, 100))
            .chain([(9000, 100)])
            .collect();
        let found = rate(&steady, 2, 0, 1095).unwrap();
        assert!((found - 10e9).abs() < 1.0, "{found}");
        let few = [(50, 100), (100, 100)];
        assert_eq!(rate(&few, 2, 0, 100), Some(2e9));
        assert_eq!(rate(&[], 2, 0, 100), None);
    }
}
