//! What became of each barrier, against the shortest time that its drives allow.

use crate::drive_set::DriveSet;
use crate::layout::DriveId;

/// Barriers whose reports are kept: about 40 tokens of Kimi K3.
pub const BARRIER_CAPACITY: usize = 4096;

/// Most drives for which the bound is exact: it looks at every set of them.
const EXACT_DRIVES: u32 = 8;

/// A barrier all of whose experts have landed. Times are in nanoseconds of the injected clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BarrierReport {
    /// Its number, as in read events.
    pub barrier: u64,
    /// Its experts.
    pub experts: u64,
    /// Bytes of whole pages of its experts.
    pub device_bytes: u64,
    /// Of these, what no drive had been asked for when it was demanded: the rest was hinted.
    pub waiting_bytes: u64,
    /// When it was demanded.
    pub asked_ns: u64,
    /// The shortest time in which the homes of its waiting bytes can deliver them, all of them at the rates that were expected
    /// when it was demanded. A lower bound of it when more than 8 drives hold them.
    pub bound_ns: u64,
    /// Time from the demand to the last landing.
    pub time_ns: u64,
    /// The drive that delivered the last piece; `None` when all was there before.
    pub last_drive: Option<DriveId>,
}

/// Reports from a point on, as [`Streamer::barriers`](crate::Streamer::barriers) gives them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BarrierBatch {
    /// Number of the first report here, counted from the streamer's start. If it is larger than the number that was asked for, the
    /// reports between were overwritten.
    pub first: u64,
    /// The reports, in the order in which the barriers were complete.
    pub barriers: Vec<BarrierReport>,
}

impl BarrierBatch {
    /// What to ask for next time.
    pub fn next(&self) -> u64 {
        self.first + self.barriers.len() as u64
    }
}

/// The shortest time in nanoseconds in which drives deliver bytes that are given by who holds them: the largest, over all sets
/// of drives, of the bytes that only they hold, divided by their rates (bytes a nanosecond) added up.
pub(crate) fn bound_ns(waiting: &[(DriveSet, u64)], rate: impl Fn(DriveSet) -> f64) -> u64 {
    let drives = waiting
        .iter()
        .fold(DriveSet::default(), |all, (holders, _)| all.union(*holders));
    let time = |set: DriveSet| {
        let inside = waiting.iter().filter(|(holders, _)| holders.is_subset(set));
        let bytes: u64 = inside.map(|(_, bytes)| bytes).sum();
        if bytes == 0 { 0.0 } else { bytes as f64 / rate(set) }
    };
    let longest = if drives.len() <= EXACT_DRIVES {
        let places: Vec<usize> = drives.places().collect();
        let set = |bits: usize| {
            places
                .iter()
                .enumerate()
                .filter(move |(i, _)| bits >> i & 1 == 1)
                .map(|(_, &p)| p)
        };
        (1..1 << places.len())
            .map(|bits| time(set(bits).collect()))
            .fold(0.0, f64::max)
    } else {
        let sets = waiting.iter().map(|(holders, _)| *holders).chain([drives]);
        sets.map(time).fold(0.0, f64::max)
    };
    longest as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(places: &[usize]) -> DriveSet {
        places.iter().copied().collect()
    }

    fn bound(rates: &[f64], waiting: &[(&[usize], u64)]) -> u64 {
        let waiting: Vec<_> = waiting.iter().map(|&(places, bytes)| (set(places), bytes)).collect();
        bound_ns(&waiting, |set| set.places().map(|place| rates[place]).sum())
    }

    #[test]
    fn the_bound_is_that_of_the_tightest_set() {
        let rates = [4.0, 2.0, 1.0];
        assert_eq!(bound(&rates, &[]), 0);
        assert_eq!(bound(&rates, &[(&[0, 1, 2], 7000)]), 1000);
        // The slow one alone, then the two slow ones together.
        assert_eq!(bound(&rates, &[(&[2], 1500), (&[0, 1, 2], 5500)]), 1500);
        assert_eq!(bound(&rates, &[(&[2], 900), (&[1, 2], 2700), (&[0, 1, 2], 100)]), 1200);
        assert_eq!(bound(&rates, &[(&[0], 400), (&[2], 1000)]), 1000);
    }

    #[test]
    fn many_drives_have_a_bound_too() {
        let rates = [1.0; 12];
        let all: Vec<usize> = (0..12).collect();
        assert_eq!(bound(&rates, &[(&all, 12_000), (&[3], 500)]), 1041);
        assert_eq!(bound(&rates, &[(&all, 12_000), (&[3], 5000)]), 5000);
    }
}
