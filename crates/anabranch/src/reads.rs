//! What was read, from where, and how that compares with what the drives allow.

use engine::Engine;
use serde::Serialize;

use crate::output::{grouped, span};

/// Sums over some time. Bytes are those of whole pages; times are seconds.
#[derive(Debug, Default, Clone, PartialEq, Serialize)]
pub struct Reads {
    pub account: Account,
    pub barriers: Barriers,
    pub drives: Vec<DriveReads>,
}

/// What became of the devices' bytes: `device` is the sum of the others but `cached`.
#[derive(Debug, Default, Clone, PartialEq, Serialize)]
pub struct Account {
    pub device: u64,
    /// Of experts that were used.
    pub needed: u64,
    /// Of guesses and broken-off passes.
    pub wasted: u64,
    /// Read again elsewhere because they were late.
    pub reread: u64,
    /// Not decided yet.
    pub pending: u64,
    /// Of experts that were used and had stayed in memory.
    pub cached: u64,
}

/// The barriers, against the shortest time that their drives allow at the rates that they then had.
#[derive(Debug, Default, Clone, PartialEq, Serialize)]
pub struct Barriers {
    pub count: u64,
    pub bound_s: f64,
    /// From the demands to the last landings.
    pub time_s: f64,
}

/// One drive. Latencies and the rate are those since the start of the program.
#[derive(Debug, Default, Clone, PartialEq, Serialize)]
pub struct DriveReads {
    pub name: String,
    pub device_bytes: u64,
    /// Of all drives' bytes.
    pub share: f64,
    pub reads: u64,
    pub failed_reads: u64,
    /// With a read in flight.
    pub busy_s: f64,
    /// Without one while something waited that it holds.
    pub idle_s: f64,
    /// Most reads in flight.
    pub depth: usize,
    /// Bytes a second, by its last reads.
    pub rate: u64,
    pub p50_s: f64,
    pub p90_s: f64,
    pub p99_s: f64,
    pub longest_s: f64,
}

impl Reads {
    /// Everything since the engine was opened.
    pub fn so_far(engine: &Engine) -> Self {
        let streamer = engine.streamer();
        let counters = streamer.counters();
        let names = streamer.layout();
        let counted = streamer.drive_counters();
        let drives = counted.iter().zip(names.drives()).map(|(counters, drive)| {
            let percentile = |percent| seconds(counters.latency.percentile(percent));
            DriveReads {
                name: drive.name(),
                device_bytes: counters.device_bytes,
                share: 0.0,
                reads: counters.reads,
                failed_reads: counters.failed_reads,
                busy_s: seconds(counters.busy_ns),
                idle_s: seconds(counters.idle_ns),
                depth: counters.most_in_flight,
                rate: counters.rate,
                p50_s: percentile(50.0),
                p90_s: percentile(90.0),
                p99_s: percentile(99.0),
                longest_s: seconds(counters.latency.longest_ns()),
            }
        });
        Self {
            drives: drives.collect(),
            account: Account {
                device: counters.device_bytes,
                needed: counters.needed_device_bytes,
                wasted: counters.wasted_device_bytes,
                reread: counters.reread_device_bytes,
                pending: counters.pending_device_bytes,
                cached: counters.cached_device_bytes,
            },
            barriers: Barriers {
                count: counters.barriers,
                bound_s: seconds(counters.barrier_bound_ns),
                time_s: seconds(counters.barrier_time_ns),
            },
        }
    }

    /// What came after `before`.
    pub fn since(mut self, before: &Self) -> Self {
        let account = &mut self.account;
        account.device -= before.account.device;
        account.needed -= before.account.needed;
        account.wasted -= before.account.wasted;
        account.reread -= before.account.reread;
        account.cached -= before.account.cached;
        self.barriers.count -= before.barriers.count;
        self.barriers.bound_s -= before.barriers.bound_s;
        self.barriers.time_s -= before.barriers.time_s;
        for (drive, before) in self.drives.iter_mut().zip(&before.drives) {
            drive.device_bytes -= before.device_bytes;
            drive.reads -= before.reads;
            drive.failed_reads -= before.failed_reads;
            drive.busy_s -= before.busy_s;
            drive.idle_s -= before.idle_s;
        }
        let all: u64 = self.drives.iter().map(|drive| drive.device_bytes).sum();
        for drive in &mut self.drives {
            drive.share = drive.device_bytes as f64 / all.max(1) as f64;
        }
        self
    }

    /// The rows of `--stats`.
    pub fn rows(&self) -> Vec<(&'static str, String)> {
        let Account {
            needed,
            wasted,
            reread,
            pending,
            ..
        } = self.account;
        let [needed, wasted, reread, pending] = [needed, wasted, reread, pending].map(grouped);
        let mut rows = vec![(
            "of these",
            format!("{needed} needed, {wasted} wasted, {reread} read again, {pending} pending"),
        )];
        let Barriers { count, bound_s, time_s } = self.barriers;
        if count > 0 {
            let part = match time_s > 0.0 {
                true => format!(" ({:.1} %)", 100.0 * bound_s / time_s),
                false => String::new(),
            };
            let (time, bound) = (span(time_s), span(bound_s));
            rows.push((
                "barriers",
                format!("{} in {time}, at the drives' rates {bound}{part}", grouped(count)),
            ));
        }
        rows
    }

    /// The table of drives; empty when nothing was read.
    pub fn table(&self) -> String {
        if self.account.device == 0 {
            return String::new();
        }
        let mut table = format!(
            "  {:>15} {:>6} {:>8} {:>7} {:>7} {:>5} {:>8} {:>8} {:>8} {:>8}  drive\n",
            "bytes", "share", "reads", "busy s", "idle s", "depth", "MB/s", "p50 ms", "p99 ms", "most ms"
        );
        for drive in &self.drives {
            let ms = |seconds: f64| format!("{:.2}", seconds * 1e3);
            let failed = match drive.failed_reads {
                0 => String::new(),
                count => format!(", {} failed reads", grouped(count)),
            };
            table += &format!(
                "  {:>15} {:>5.1}% {:>8} {:>7.2} {:>7.2} {:>5} {:>8.0} {:>8} {:>8} {:>8}  {}{failed}\n",
                grouped(drive.device_bytes),
                100.0 * drive.share,
                grouped(drive.reads),
                drive.busy_s,
                drive.idle_s,
                drive.depth,
                drive.rate as f64 / 1e6,
                ms(drive.p50_s),
                ms(drive.p99_s),
                ms(drive.longest_s),
                drive.name,
            );
        }
        table
    }
}

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reads(device: [u64; 2], count: u64) -> Reads {
        let drive = |name: &str, device_bytes| DriveReads {
            name: name.into(),
            device_bytes,
            reads: device_bytes / 4096,
            ..DriveReads::default()
        };
        Reads {
            account: Account {
                device: device.iter().sum(),
                needed: device.iter().sum(),
                ..Account::default()
            },
            barriers: Barriers {
                count,
                bound_s: count as f64,
                time_s: 2.0 * count as f64,
            },
            drives: vec![drive("/a", device[0]), drive("/b", device[1])],
        }
    }

    #[test]
    fn one_answer_is_what_came_after_the_last() {
        let found = reads([40_960, 81_920], 5).since(&reads([8192, 0], 2));
        assert_eq!((found.account.device, found.barriers.count), (114_688, 3));
        let shares: Vec<u64> = found.drives.iter().map(|drive| (drive.share * 1000.0) as u64).collect();
        assert_eq!(shares, [285, 714]);
        let rows = found.rows();
        assert_eq!(rows[0].1, "114,688 needed, 0 wasted, 0 read again, 0 pending");
        assert_eq!(rows[1].1, "3 in 6.0 s, at the drives' rates 3.0 s (50.0 %)");
        let table = found.table();
        assert!(
            table.lines().nth(1).unwrap().ends_with("/a") && table.contains("28.6%"),
            "{table}"
        );
    }

    #[test]
    fn nothing_read_has_no_table() {
        assert_eq!(Reads::default().table(), "");
    }
}
