//! Sums over a streamer's life.

use crate::histogram::Latencies;

/// Sums over a streamer's life. Bytes count once all bytes of a read have arrived.
///
/// The bytes of the devices always add up: `device_bytes = needed + wasted + reread + pending`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Experts that landed whole.
    pub experts_read: u64,
    /// Reads that ended well.
    pub reads: u64,
    /// Reads that failed.
    pub failed_reads: u64,
    /// Reads of pieces that were late elsewhere.
    pub rereads: u64,
    /// Bytes of experts that were asked for and read.
    pub expert_bytes_read: u64,
    /// The same, widened to whole pages: what the devices delivered.
    pub device_bytes: u64,
    /// Of [`device_bytes`](Self::device_bytes), those of experts that a barrier handed out.
    pub needed_device_bytes: u64,
    /// Experts that were demanded and were in memory, so that nothing was read.
    pub cache_hits: u64,
    /// Their bytes, not in [`expert_bytes_read`](Self::expert_bytes_read).
    pub cached_bytes: u64,
    /// The same, widened to whole pages, not in [`device_bytes`](Self::device_bytes): `needed_device_bytes + cached_device_bytes` are
    /// the pages of all experts that barriers handed out.
    pub cached_device_bytes: u64,
    /// Those of experts that nobody took: a hint that was not demanded, a barrier that failed or was dropped.
    pub wasted_device_bytes: u64,
    /// Those that had landed before: a piece was late, was read from another home too, and then came after all.
    pub reread_device_bytes: u64,
    /// Those of experts whose fate is open: not whole yet, not taken yet, or hinted.
    pub pending_device_bytes: u64,
    /// Barriers all of whose experts have landed.
    pub barriers: u64,
    /// Their bounds added up, in nanoseconds: see [`BarrierReport`](crate::BarrierReport).
    pub barrier_bound_ns: u64,
    /// Their times added up, in nanoseconds, each from the demand to the last landing.
    pub barrier_time_ns: u64,
    /// Experts that were demanded after a hint, so that what had been read of them was not read again.
    pub hints_used: u64,
    /// Answers of the back end to reads that were not in flight. Not 0 means that the back end is wrong.
    pub stray_completions: u64,
}

/// Sums of one drive.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DriveCounters {
    /// Reads that ended well.
    pub reads: u64,
    /// Reads that failed.
    pub failed_reads: u64,
    /// Bytes of experts read.
    pub bytes: u64,
    /// The same, widened to whole pages.
    pub device_bytes: u64,
    /// Nanoseconds with at least one read in flight.
    pub busy_ns: u64,
    /// Nanoseconds with no read in flight while something waited that was demanded and that the drive holds: every slot was held,
    /// or other drives were expected to do it sooner.
    pub idle_ns: u64,
    /// Reads in flight now.
    pub in_flight: usize,
    /// Most reads that were in flight at once.
    pub most_in_flight: usize,
    /// The rate that the drive is expected to have, from its last reads, in bytes a second.
    pub rate: u64,
    /// Times from issue to landing of the reads that ended well.
    pub latency: Latencies,
}
