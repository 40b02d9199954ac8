//! What drives are expected to do: their recent rates, and when they will be done with what they have.

use crate::drive_set::DriveSet;

/// A rate is measured over about this many of a drive's last bytes: a few milliseconds, so that it follows a drive that slows
/// down within one barrier, and several pieces, so that one of them decides little.
const RATE_WINDOW_BYTES: f64 = (32 << 20) as f64;

/// Rate of a drive of which nothing is known, in bytes a nanosecond: 2 GB/s. The first reads replace it.
const UNKNOWN_RATE: f64 = 2.0;

/// One read weighs at most as if it had run this many times slower than expected, so that one stall does not make a drive
/// look dead.
const SLOWEST_SAMPLE: f64 = 8.0;

/// While a drive is not read, a low rate is trusted less and less: after this time the expectation doubles, after twice this
/// time again, up to the drive's best. Else a drive that was slow once would never be tried again.
const RELAX_NS: f64 = 1e9;

/// No rate is taken to be lower, in bytes a nanosecond: 1 kB/s.
const LOWEST_RATE: f64 = 1e-6;

/// One drive's recent rate and what it has in flight. Rates are in bytes a nanosecond.
#[derive(Debug, Clone)]
pub(crate) struct Pace {
    /// Best known rate; 0 while nothing is known.
    best: f64,
    /// Recent bytes and the time that they took, both fading.
    bytes: f64,
    ns: f64,
    measured_ns: u64,
    /// Since when the drive works on the oldest read in flight: its issue, or the last landing.
    since_ns: u64,
    queued: u64,
    reads: u32,
}

impl Pace {
    /// A drive of a known rate in bytes a second, or of an unknown one.
    pub(crate) fn new(rate: Option<u64>) -> Self {
        let best = rate.map_or(0.0, |rate| rate as f64 / 1e9);
        // What was told weighs as much as half a window of reads.
        let bytes = if best > 0.0 { RATE_WINDOW_BYTES / 2.0 } else { 0.0 };
        Self {
            best,
            bytes,
            ns: if best > 0.0 { bytes / best } else { 0.0 },
            measured_ns: 0,
            since_ns: 0,
            queued: 0,
            reads: 0,
        }
    }

    /// A read of `len` bytes starts.
    pub(crate) fn issue(&mut self, len: u64, now_ns: u64) {
        if self.reads == 0 {
            self.since_ns = now_ns;
        }
        self.queued += len;
        self.reads += 1;
    }

    /// A read of `len` bytes has ended.
    pub(crate) fn end(&mut self, len: u64, landed_ns: u64, ok: bool) {
        if ok {
            self.measure(len as f64, landed_ns);
        }
        self.since_ns = self.since_ns.max(landed_ns);
        self.queued -= len;
        self.reads -= 1;
    }

    /// Bytes in flight.
    pub(crate) fn queued(&self) -> u64 {
        self.queued
    }

    fn measure(&mut self, len: f64, landed_ns: u64) {
        let known = self.bytes > 0.0;
        let most = if known {
            SLOWEST_SAMPLE * len / self.rate(landed_ns)
        } else {
            f64::INFINITY
        };
        let keep = 1.0 - (len / RATE_WINDOW_BYTES).min(0.5);
        self.bytes = self.bytes * keep + len;
        self.ns = self.ns * keep + (landed_ns.saturating_sub(self.since_ns) as f64).min(most);
        self.measured_ns = landed_ns;
        if self.bytes >= RATE_WINDOW_BYTES / 2.0 {
            self.best = self.best.max(self.measured());
        }
    }

    fn measured(&self) -> f64 {
        if self.ns > 0.0 {
            (self.bytes / self.ns).max(LOWEST_RATE)
        } else {
            UNKNOWN_RATE
        }
    }

    /// The rate that is expected now.
    pub(crate) fn rate(&self, now_ns: u64) -> f64 {
        let rate = self.measured();
        let unread = now_ns.saturating_sub(self.measured_ns) as f64 / RELAX_NS;
        if self.reads > 0 || unread < 1.0 || rate >= self.best {
            return rate;
        }
        (rate * unread.exp2()).min(self.best)
    }

    /// In how many nanoseconds from now the drive is expected to be done with what it has. An overdue read is expected to take
    /// as long again as it is overdue.
    fn done_in(&self, now_ns: u64, rate: f64) -> f64 {
        if self.reads == 0 {
            return 0.0;
        }
        let one = self.queued as f64 / f64::from(self.reads) / rate;
        let late = now_ns.saturating_sub(self.since_ns) as f64 - one;
        self.queued as f64 / rate - one + late.abs()
    }
}

/// What all drives are expected to do, as of one moment. Times are in nanoseconds from then.
#[derive(Debug, Default)]
pub(crate) struct Outlook {
    drives: Vec<(f64, f64)>,
}

impl Outlook {
    pub(crate) fn look(&mut self, paces: &[Pace], now_ns: u64) {
        let one = |pace: &Pace| {
            let rate = pace.rate(now_ns);
            (rate, pace.done_in(now_ns, rate))
        };
        self.drives.clear();
        self.drives.extend(paces.iter().map(one));
    }

    /// Rate of the drive at a place of the layout.
    pub(crate) fn rate(&self, place: usize) -> f64 {
        self.drives[place].0
    }

    /// Rates of a set of drives, added up.
    pub(crate) fn rate_of(&self, set: DriveSet) -> f64 {
        set.places().map(|place| self.rate(place)).sum()
    }

    /// When a drive is done with what it has.
    pub(crate) fn free(&self, place: usize) -> f64 {
        self.drives[place].1
    }

    /// When a drive is done with `bytes` more.
    pub(crate) fn alone(&self, place: usize, bytes: u64) -> f64 {
        let (rate, free) = self.drives[place];
        free + bytes as f64 / rate
    }

    /// When drives are done with `bytes` more, if they share them in the best way. Infinite for no drives.
    pub(crate) fn shared(&self, mut set: DriveSet, bytes: u64) -> f64 {
        loop {
            let (mut work, mut rate) = (bytes as f64, 0.0);
            for place in set.places() {
                work += self.rate(place) * self.free(place);
                rate += self.rate(place);
            }
            if rate == 0.0 {
                return f64::INFINITY;
            }
            let done = work / rate;
            // A drive that is busy for longer takes no part.
            let partners: DriveSet = set.places().filter(|&place| self.free(place) <= done).collect();
            if partners == set || partners.is_empty() {
                return done;
            }
            set = partners;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: u64 = 1 << 20;

    /// Reads `count` pieces of 1 MiB one after the other at `rate`, from `now`.
    fn read(pace: &mut Pace, count: u64, rate: f64, now: &mut u64) {
        for _ in 0..count {
            pace.issue(MB, *now);
            *now += (MB as f64 / rate) as u64;
            pace.end(MB, *now, true);
        }
    }

    #[test]
    fn a_rate_follows_the_drive() {
        let (mut pace, mut now) = (Pace::new(None), 5);
        assert_eq!(pace.rate(now), UNKNOWN_RATE);
        read(&mut pace, 1, 0.5, &mut now);
        assert!((pace.rate(now) - 0.5).abs() < 0.01);
        read(&mut pace, 100, 6.0, &mut now);
        assert!((pace.rate(now) - 6.0).abs() < 0.4);
        read(&mut pace, 100, 3.0, &mut now);
        assert!((pace.rate(now) - 3.0).abs() < 0.2);
    }

    #[test]
    fn depth_does_not_look_like_slowness() {
        // Four in flight, served in turn: each took four services from issue to landing.
        let mut pace = Pace::new(None);
        for turn in 0..4 {
            pace.issue(MB, turn);
        }
        let mut now = 0;
        for _ in 0..200 {
            now += MB / 4;
            pace.end(MB, now, true);
            pace.issue(MB, now);
        }
        assert!((pace.rate(now) - 4.0).abs() < 0.01);
        assert!((pace.done_in(now, 4.0) - MB as f64).abs() < 1.0);
    }

    #[test]
    fn one_stall_weighs_little_and_a_slow_drive_is_tried_again() {
        let (mut pace, mut now) = (Pace::new(Some(5_000_000_000)), 0);
        read(&mut pace, 40, 5.0, &mut now);
        read(&mut pace, 1, 0.001, &mut now);
        assert!(pace.rate(now) > 3.5, "{}", pace.rate(now));
        read(&mut pace, 300, 0.05, &mut now);
        assert!(pace.rate(now) < 0.06);
        assert_eq!(pace.rate(now + 900_000_000), pace.rate(now));
        assert!((pace.rate(now + 2_000_000_000) / pace.rate(now) - 4.0).abs() < 0.01);
        assert!((pace.rate(now + 60_000_000_000) - 5.0).abs() < 0.5);
    }

    #[test]
    fn an_overdue_drive_is_not_taken_to_be_free() {
        let mut pace = Pace::new(Some(1_000_000_000));
        pace.issue(1000, 0);
        assert_eq!(pace.done_in(0, 1.0), 1000.0);
        assert_eq!(pace.done_in(400, 1.0), 600.0);
        assert_eq!(pace.done_in(1000, 1.0), 0.0);
        assert_eq!(pace.done_in(5000, 1.0), 4000.0);
    }

    #[test]
    fn shared_work_ends_at_once_on_all() {
        let outlook = Outlook {
            drives: vec![(2.0, 0.0), (1.0, 30.0), (1.0, 1000.0)],
        };
        let set = |places: &[usize]| places.iter().copied().collect::<DriveSet>();
        assert_eq!(outlook.alone(1, 10), 40.0);
        assert_eq!(outlook.shared(set(&[0]), 100), 50.0);
        // 2 t + (t - 30) = 100; the third is busy beyond that.
        let done = outlook.shared(set(&[0, 1, 2]), 100);
        assert!((done - 130.0 / 3.0).abs() < 1e-9);
        // Too little for the second to be worth it.
        assert_eq!(outlook.shared(set(&[0, 1]), 20), 10.0);
        assert!(outlook.shared(set(&[]), 1).is_infinite());
    }
}
