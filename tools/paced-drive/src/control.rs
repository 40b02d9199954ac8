//! What can be done to a drive while it runs, and what it tells about itself.

use std::str::FromStr;
use std::sync::Arc;

use serde::Serialize;

use crate::queue::Queue;

/// Name of the file in the mount that takes commands and gives the status.
pub const CONTROL_NAME: &str = "control";

/// A change of a drive.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Command {
    /// `rate N`, in megabytes (10^6) a second: another bandwidth, here in bytes a second, for reads that arrive from now on.
    Rate(f64),
    /// `latency N`, in microseconds: another latency, here in nanoseconds, for reads that arrive from now on.
    Latency(u64),
    /// `fail N`: the next `N` answers are I/O errors, at the time at which the data would have come.
    Fail(u64),
    /// `stall N`, in milliseconds: nothing is answered for so long, here in nanoseconds. What waits is delayed too.
    Stall(u64),
    /// `vanish`: everything ends with "no such device", also what waits, until `return`.
    Vanish,
    /// `return`: the drive is there again.
    Return,
}

/// A drive from outside.
#[derive(Debug, Clone)]
pub struct Control {
    pub(crate) queue: Arc<Queue>,
}

/// What a drive tells about itself.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Status {
    /// Bandwidth in bytes a second.
    pub rate: f64,
    /// Nanoseconds.
    pub latency_ns: u64,
    /// Whether it is there: not vanished.
    pub present: bool,
    /// Reads answered with data.
    pub reads: u64,
    /// Bytes of them.
    pub bytes: u64,
    /// Reads answered with an error.
    pub failed: u64,
    /// Reads that wait for their answer.
    pub waiting: usize,
    /// Nanoseconds by which the latest answer so far was late: what the machine could not keep up with.
    pub latest_ns: u64,
    /// Longest time in nanoseconds that it took to fetch the data of a read from the source, which happens while the read waits.
    pub slowest_fetch_ns: u64,
}

impl Control {
    /// Carries out a command.
    pub fn run(&self, command: Command) {
        self.queue.run(command);
    }

    /// Sums since the mount, and the settings.
    pub fn status(&self) -> Status {
        self.queue.status()
    }
}

impl FromStr for Command {
    type Err = String;

    /// A line of the control file.
    fn from_str(line: &str) -> Result<Self, String> {
        let mut words = line.split_whitespace();
        let name = words.next().unwrap_or_default();
        let number = words.next();
        let wrong = || {
            format!("found {line:?}, expected one of: rate MB_PER_S, latency US, fail COUNT, stall MS, vanish, return")
        };
        if words.next().is_some() {
            return Err(wrong());
        }
        let above = |least: f64| {
            let number: f64 = number.and_then(|text| text.parse().ok()).ok_or_else(wrong)?;
            let fits = number.is_finite() && number >= least && number < 1e9;
            fits.then_some(number).ok_or_else(wrong)
        };
        match (name, number) {
            ("rate", _) => Ok(Self::Rate(above(1e-6)? * 1e6)),
            ("latency", _) => Ok(Self::Latency((above(0.0)? * 1e3) as u64)),
            ("fail", _) => Ok(Self::Fail(above(0.0)? as u64)),
            ("stall", _) => Ok(Self::Stall((above(0.0)? * 1e6) as u64)),
            ("vanish", None) => Ok(Self::Vanish),
            ("return", None) => Ok(Self::Return),
            _ => Err(wrong()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_commands() {
        for (line, command) in [
            ("rate 177.5", Command::Rate(177.5e6)),
            (" latency 80 ", Command::Latency(80_000)),
            ("fail 3", Command::Fail(3)),
            ("stall 500", Command::Stall(500_000_000)),
            ("vanish", Command::Vanish),
            ("return", Command::Return),
        ] {
            assert_eq!(line.parse(), Ok(command));
        }
        for line in [
            "", "rate", "rate 0", "rate -1", "rate nan", "rate 1 2", "vanish 1", "fly", "stall x",
        ] {
            let error = line.parse::<Command>().unwrap_err();
            assert!(error.contains("expected one of"), "{error}");
        }
    }
}
