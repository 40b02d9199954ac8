//! Time as the streamer sees it: injected, so that a simulated back end can run in virtual time.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// A source of time in nanoseconds since an arbitrary origin. It never goes back.
pub trait Clock: Send + Sync {
    /// Nanoseconds since the origin.
    fn now_ns(&self) -> u64;
}

/// The operating system's monotonic clock; the origin is the clock's creation.
#[derive(Debug)]
pub struct MonotonicClock {
    origin: Instant,
}

impl MonotonicClock {
    /// A clock that starts at zero now.
    pub fn new() -> Self {
        Self { origin: Instant::now() }
    }
}

impl Default for MonotonicClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for MonotonicClock {
    fn now_ns(&self) -> u64 {
        u64::try_from(self.origin.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}

/// Time that moves only when it is told to.
#[derive(Debug, Default)]
pub struct VirtualClock {
    now: AtomicU64,
}

impl VirtualClock {
    /// Moves the clock to `ns`, or leaves it where it is when `ns` has passed already.
    pub fn advance_to(&self, ns: u64) {
        self.now.fetch_max(ns, Ordering::Relaxed);
    }
}

impl Clock for VirtualClock {
    fn now_ns(&self) -> u64 {
        self.now.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn virtual_time_never_goes_back() {
        let clock = VirtualClock::default();
        clock.advance_to(7);
        clock.advance_to(3);
        assert_eq!(clock.now_ns(), 7);
    }

    #[test]
    fn monotonic_time_moves() {
        let clock = MonotonicClock::new();
        let first = clock.now_ns();
        std::thread::sleep(std::time::Duration::from_millis(1));
        assert!(clock.now_ns() >= first + 1_000_000);
    }
}
