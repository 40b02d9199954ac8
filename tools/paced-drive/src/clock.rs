//! When a drive of a given speed would be done with a read. Pure: times come from outside, in nanoseconds.

/// How fast a drive is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pace {
    /// Bytes per second.
    pub rate: f64,
    /// Nanoseconds from the moment at which a read's last byte is there to its answer.
    pub latency_ns: u64,
}

impl Default for Pace {
    /// 500 MB/s with 80 us, like a drive on a serial bus.
    fn default() -> Self {
        Self {
            rate: 500e6,
            latency_ns: 80_000,
        }
    }
}

/// The drive's own clock: up to when it is busy.
#[derive(Debug)]
pub(crate) struct DriveClock {
    pub(crate) pace: Pace,
    busy_until_ns: f64,
}

impl DriveClock {
    pub(crate) fn new(pace: Pace) -> Self {
        Self {
            pace,
            busy_until_ns: 0.0,
        }
    }

    /// Takes the time of a read that arrives now; gives the moment of its answer.
    pub(crate) fn reserve(&mut self, now_ns: u64, bytes: u64) -> u64 {
        let begin = self.busy_until_ns.max(now_ns as f64);
        self.busy_until_ns = begin + bytes as f64 / self.pace.rate * 1e9;
        self.busy_until_ns as u64 + self.pace.latency_ns
    }

    /// Does nothing for a while, from now or from the end of what it is doing.
    pub(crate) fn stall(&mut self, now_ns: u64, for_ns: u64) {
        self.busy_until_ns = self.busy_until_ns.max(now_ns as f64) + for_ns as f64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn clock() -> DriveClock {
        DriveClock::new(Pace {
            rate: 1e9,
            latency_ns: 10,
        })
    }

    #[test]
    fn reads_wait_for_each_other_but_not_for_idle_time() {
        let mut clock = clock();
        assert_eq!(clock.reserve(100, 1000), 1110);
        assert_eq!(clock.reserve(100, 500), 1610);
        assert_eq!(clock.reserve(9000, 1000), 10_010);
    }

    #[test]
    fn a_new_rate_holds_from_the_next_read_on() {
        let mut clock = clock();
        assert_eq!(clock.reserve(0, 1000), 1010);
        clock.pace.rate = 0.5e9;
        assert_eq!(clock.reserve(0, 1000), 3010);
    }

    #[test]
    fn a_stall_delays_what_comes_after_it() {
        let mut clock = clock();
        clock.reserve(0, 1000);
        clock.stall(500, 2000);
        assert_eq!(clock.reserve(600, 1000), 4010);
    }

    #[test]
    fn many_small_reads_take_as_long_as_one_large_one() {
        let mut clock = DriveClock::new(Pace {
            rate: 177.5e6,
            latency_ns: 0,
        });
        let last = (0..10_000).map(|_| clock.reserve(0, 4096)).last();
        let whole = (40_960_000.0 / 177.5e6 * 1e9) as u64;
        assert!(last.unwrap().abs_diff(whole) <= 1);
    }
}
