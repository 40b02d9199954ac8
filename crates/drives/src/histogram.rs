//! Times in memory of fixed size: a histogram with four buckets an octave.

use std::fmt;

/// Buckets an octave, as a power of two.
const SPLIT: u32 = 2;

/// Buckets: all of 64 bits.
const BUCKETS: usize = (64 - SPLIT as usize + 1) << SPLIT;

/// How often times of each length were seen. A percentile is exact within a quarter.
#[derive(Clone, PartialEq, Eq)]
pub struct Latencies {
    counts: [u32; BUCKETS],
    total: u64,
    longest_ns: u64,
}

impl Default for Latencies {
    fn default() -> Self {
        Self {
            counts: [0; BUCKETS],
            total: 0,
            longest_ns: 0,
        }
    }
}

impl Latencies {
    /// Adds one.
    pub(crate) fn add(&mut self, ns: u64) {
        let count = &mut self.counts[bucket(ns)];
        *count = count.saturating_add(1);
        self.total += 1;
        self.longest_ns = self.longest_ns.max(ns);
    }

    /// How many there are.
    pub fn count(&self) -> u64 {
        self.total
    }

    /// A time in nanoseconds that `percent` of 100 do not exceed: the end of its bucket, or the longest. 0 when there are none.
    pub fn percentile(&self, percent: f64) -> u64 {
        let rank = (percent / 100.0 * self.total as f64).ceil().max(1.0) as u64;
        let mut below = 0;
        for (bucket, &count) in self.counts.iter().enumerate() {
            below += u64::from(count);
            if below >= rank {
                return end(bucket).min(self.longest_ns);
            }
        }
        self.longest_ns
    }

    /// The longest, in nanoseconds.
    pub fn longest_ns(&self) -> u64 {
        self.longest_ns
    }
}

impl fmt::Debug for Latencies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Latencies")
            .field("count", &self.total)
            .field("p50_ns", &self.percentile(50.0))
            .field("p99_ns", &self.percentile(99.0))
            .field("longest_ns", &self.longest_ns)
            .finish()
    }
}

/// Small times have a bucket each; above, a bucket is told by the highest bit and the two after it.
fn bucket(ns: u64) -> usize {
    let octave = u64::BITS - ns.leading_zeros();
    let Some(shift) = octave.checked_sub(SPLIT + 1) else {
        return ns as usize;
    };
    ((shift as usize) << SPLIT) + (ns >> shift) as usize
}

/// Last time of a bucket.
fn end(bucket: usize) -> u64 {
    let part = bucket & ((1 << SPLIT) - 1) | 1 << SPLIT;
    match (bucket >> SPLIT).checked_sub(1) {
        None => bucket as u64,
        Some(shift) => (((part as u128 + 1) << shift) - 1) as u64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_narrow_and_in_order() {
        for ns in (0..5000).chain((0..64).map(|bit| 1 << bit)).chain([u64::MAX]) {
            let place = bucket(ns);
            assert!(place < BUCKETS && ns <= end(place), "{ns}");
            assert!(end(place) - ns <= ns / 4, "{ns} in a bucket up to {}", end(place));
        }
        for ns in 1..5000 {
            assert!(bucket(ns) - bucket(ns - 1) <= 1, "{ns}");
        }
    }

    #[test]
    fn percentiles() {
        let mut times = Latencies::default();
        assert_eq!(times.percentile(99.0), 0);
        for ns in 1..=1000 {
            times.add(ns * 1000);
        }
        assert_eq!((times.count(), times.longest_ns()), (1000, 1_000_000));
        for (percent, exact) in [(50.0, 500_000), (90.0, 900_000), (99.0, 990_000)] {
            let found = times.percentile(percent);
            assert!((exact..=exact * 5 / 4).contains(&found), "{percent} % at {found}");
        }
        assert_eq!(times.percentile(100.0), 1_000_000);
    }
}
