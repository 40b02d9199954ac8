//! How fast drives are and how they like to be read: measured at start in less than a second, or remembered.

use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::device::Device;
use crate::error::{Error, Result};
use crate::layout::{DriveId, Layout};
use crate::notice::{Notice, Notices};
use crate::page::PAGE_BYTES;
use crate::stream::{CHUNK_BYTES, DriveTuning};
use crate::threads::DEFAULT_DEPTH;

mod rig;
mod search;

/// Time that measuring a layout takes at most, unless a single read of a drive takes longer than its part of it.
pub const MEASURE_BUDGET: Duration = Duration::from_millis(900);

/// A remembered profile is measured again when it is older.
pub const PROFILE_MAX_AGE: Duration = Duration::from_secs(30 * 24 * 3600);

/// Chunk sizes that are compared, in bytes, ascending.
pub const CHUNK_SIZES: [usize; 4] = [512 << 10, 1 << 20, 2 << 20, 4 << 20];

/// Depths that are compared, ascending.
pub const DEPTHS: [usize; 4] = [1, 2, 4, 8];

/// What is in flight on a drive should last so long: a thread that has to issue the next read may wait for a processor.
pub const PATIENCE: Duration = Duration::from_millis(10);

/// Most bytes in flight on a drive, about a millisecond of the fastest: more only makes reads wait longer.
pub const MOST_IN_FLIGHT: usize = 16 << 20;

/// Version of the remembered form.
const VERSION: u32 = 1;

/// Largest remembered profile in bytes: thousands of drives. A longer file is something else.
const MAX_PROFILE_BYTES: u64 = 1 << 20;

/// A rate above this many bytes per second is no drive's.
const MAX_RATE: u64 = 10_000_000_000_000;

/// The drives of a layout, measured.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    version: u32,
    /// When it was measured, in seconds since 1970.
    pub measured_at: u64,
    /// How the reads were made, as [`Backend::describe`](crate::Backend::describe) says it.
    pub backend: String,
    /// One for each drive, in the layout's order.
    pub drives: Vec<DriveProfile>,
    /// Drives that share a bottleneck: places in [`drives`](Self::drives), ascending, each in one group at most. The bottleneck may
    /// be a link, a disk that they are parts of, or the processor.
    pub groups: Vec<Vec<usize>>,
}

/// One drive of a [`Profile`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DriveProfile {
    /// The device.
    pub device: Device,
    /// How fast it is; `None` when it could not be measured.
    pub speed: Option<DriveSpeed>,
    /// Why it could not be measured, or failed while it was.
    pub problem: Option<String>,
}

/// How fast a drive is and how it likes to be read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DriveSpeed {
    /// Bytes per second when only this drive is read.
    pub alone: u64,
    /// Bytes per second when all drives are read.
    pub together: u64,
    /// The smallest chunk of [`CHUNK_SIZES`] that reaches the ceiling and is not too hasty for the processor.
    pub chunk_bytes: usize,
    /// The smallest depth of [`DEPTHS`] that reaches the ceiling with such chunks.
    pub depth: usize,
}

impl Profile {
    /// Measures the drives of a layout by reading its files, and nothing else, at random places among its experts, in about
    /// [`MEASURE_BUDGET`].
    ///
    /// # Errors
    ///
    /// [`Error::Open`] when a file or folder cannot be opened, [`Error::Map`] and [`Error::Thread`] when memory or threads are
    /// short. A drive that cannot be read is no error: it has a [`problem`](DriveProfile::problem) instead of a speed.
    pub fn measure(layout: &Arc<Layout>, notices: &Notices) -> Result<Self> {
        let devices = devices(layout)?;
        let mut rig = rig::DriveRig::new(layout, &devices, notices)?;
        let found = search::search(&mut rig, MEASURE_BUDGET);
        let drive = |(drive, (device, speed)): (usize, (Device, Option<DriveSpeed>))| DriveProfile {
            device,
            problem: rig.problem(drive).or_else(|| speed.is_none().then(too_short)),
            speed,
        };
        Ok(Self {
            version: VERSION,
            measured_at: now(),
            backend: rig.backend(),
            drives: devices.into_iter().zip(found.speeds).enumerate().map(drive).collect(),
            groups: found.groups,
        })
    }

    /// The profile that is remembered in a file, if it fits the layout's drives; otherwise measures and remembers it there.
    ///
    /// A notice says why a remembered profile was not used, or why the new one could not be kept.
    ///
    /// # Errors
    ///
    /// As [`measure`](Self::measure).
    pub fn load_or_measure(layout: &Arc<Layout>, path: &Path, notices: &Notices) -> Result<Self> {
        match Self::remembered(path, &devices(layout)?, now()) {
            Ok(Some(profile)) => return Ok(profile),
            Ok(None) => {}
            Err(reason) => notices.add(Notice::ProfileDropped {
                path: path.to_path_buf(),
                reason,
            }),
        }
        let profile = Self::measure(layout, notices)?;
        if let Err(error) = profile.remember(path) {
            notices.add(Notice::ProfileNotKept {
                path: path.to_path_buf(),
                reason: error.to_string(),
            });
        }
        Ok(profile)
    }

    /// Writes the profile to a file, whole or not at all.
    ///
    /// # Errors
    ///
    /// The operating system's, when the file's folder cannot be written to.
    pub fn remember(&self, path: &Path) -> io::Result<()> {
        let mut text = serde_json::to_vec_pretty(self)?;
        text.push(b'\n');
        let mut name = path.as_os_str().to_os_string();
        name.push(format!(".{}.new", std::process::id()));
        let new = Path::new(&name);
        let written = std::fs::File::create(new)
            .and_then(|mut file| file.write_all(&text))
            .and_then(|()| std::fs::rename(new, path));
        if written.is_err() {
            // Nothing depends on what is left of it.
            let _ = std::fs::remove_file(new);
        }
        written
    }

    /// What a file remembers of these devices; `None` when there is no file, an error when it is of no use.
    fn remembered(path: &Path, devices: &[Device], now: u64) -> std::result::Result<Option<Self>, String> {
        match std::fs::metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error.to_string()),
            Ok(found) if found.len() > MAX_PROFILE_BYTES => {
                return Err(format!("{} bytes, expected at most {MAX_PROFILE_BYTES}", found.len()));
            }
            Ok(_) => {}
        }
        let text = std::fs::read(path).map_err(|error| error.to_string())?;
        let profile: Self = serde_json::from_slice(&text).map_err(|error| format!("not a profile: {error}"))?;
        profile.check(devices, now)?;
        Ok(Some(profile))
    }

    /// Whether a profile from outside makes sense and speaks of these devices.
    fn check(&self, devices: &[Device], now: u64) -> std::result::Result<(), String> {
        if self.version != VERSION {
            return Err(format!("version {}, expected {VERSION}", self.version));
        }
        if self.drives.len() != devices.len() {
            return Err(format!("{} drives, now {}", self.drives.len(), devices.len()));
        }
        for (drive, device) in self.drives.iter().zip(devices) {
            if drive.device != *device {
                return Err(format!("it was measured on {}, now there is {device}", drive.device));
            }
            if let Some(speed) = &drive.speed {
                speed.check()?;
            }
        }
        let mut members: Vec<usize> = self.groups.concat();
        let count = members.len();
        members.sort_unstable();
        members.dedup();
        let in_range = members.last().is_none_or(|&last| last < self.drives.len());
        if members.len() != count || !in_range || !self.groups.iter().all(|group| group.len() > 1 && group.is_sorted())
        {
            return Err(format!("groups {:?} of {} drives", self.groups, self.drives.len()));
        }
        let age = now
            .checked_sub(self.measured_at)
            .ok_or_else(|| "it was measured in the future".to_string())?;
        if age > PROFILE_MAX_AGE.as_secs() {
            let days = |seconds: u64| seconds / (24 * 3600);
            let most = days(PROFILE_MAX_AGE.as_secs());
            return Err(format!("{} days old, expected at most {most}", days(age)));
        }
        Ok(())
    }

    /// What is known of a drive's speed.
    pub fn speed(&self, drive: DriveId) -> Option<&DriveSpeed> {
        self.drives.get(drive.index())?.speed.as_ref()
    }

    /// Reads to keep in flight on each drive, in the layout's order: see [`DriveSpeed::patient_depth`]. [`DEFAULT_DEPTH`] where it
    /// was not measured.
    pub fn depths(&self) -> Vec<usize> {
        let depth = |drive: &DriveProfile| drive.speed.as_ref().map_or(DEFAULT_DEPTH, DriveSpeed::patient_depth);
        self.drives.iter().map(depth).collect()
    }

    /// Most bytes of one read on each drive, in the layout's order; [`CHUNK_BYTES`] where it was not measured.
    pub fn chunks(&self) -> Vec<usize> {
        let chunk = |drive: &DriveProfile| drive.speed.as_ref().map_or(CHUNK_BYTES, |speed| speed.chunk_bytes);
        self.drives.iter().map(chunk).collect()
    }

    /// What a streamer should know of each drive, in the layout's order: see [`StreamOptions::tuning`](crate::StreamOptions::tuning).
    pub fn tuning(&self) -> Vec<DriveTuning> {
        let tuning = |speed: &DriveSpeed| DriveTuning {
            rate: Some(speed.together),
            chunk_bytes: Some(speed.chunk_bytes),
            depth: Some(speed.patient_depth()),
        };
        let drives = self.drives.iter();
        drives
            .map(|drive| drive.speed.as_ref().map(tuning).unwrap_or_default())
            .collect()
    }

    /// Bytes per second that all measured drives together give.
    pub fn sum_together(&self) -> u64 {
        let speeds = self.drives.iter().filter_map(|drive| drive.speed.as_ref());
        speeds.map(|speed| speed.together).sum()
    }

    /// Places of the drives that share a bottleneck with this one.
    pub fn shares_with(&self, drive: usize) -> Vec<usize> {
        let group = self.groups.iter().find(|group| group.contains(&drive));
        let others = group.into_iter().flatten().copied();
        others.filter(|&other| other != drive).collect()
    }
}

impl DriveSpeed {
    /// Reads to keep in flight while the processor has other work too: as many as last for [`PATIENCE`], at least
    /// [`depth`](Self::depth), at most [`MOST_IN_FLIGHT`] bytes.
    pub fn patient_depth(&self) -> usize {
        let chunk = self.chunk_bytes.max(1);
        let lasting = (self.together as f64 * PATIENCE.as_secs_f64() / chunk as f64).ceil() as usize;
        lasting.min(MOST_IN_FLIGHT / chunk).max(self.depth)
    }

    fn check(&self) -> std::result::Result<(), String> {
        let rate = |rate: u64| rate > 0 && rate < MAX_RATE;
        if !rate(self.alone) || !rate(self.together) {
            return Err(format!(
                "rates of {} and {} bytes per second",
                self.alone, self.together
            ));
        }
        if !CHUNK_SIZES.contains(&self.chunk_bytes) || !DEPTHS.contains(&self.depth) {
            let (chunk, depth) = (self.chunk_bytes, self.depth);
            return Err(format!("chunks of {chunk} bytes at depth {depth}"));
        }
        Ok(())
    }
}

/// Every chunk is whole pages.
const _: () = {
    let mut place = 0;
    while place < CHUNK_SIZES.len() {
        assert!(CHUNK_SIZES[place].is_multiple_of(PAGE_BYTES));
        place += 1;
    }
};

fn too_short() -> String {
    format!(
        "it holds no file of {} KiB or more, so there is nothing to measure with",
        CHUNK_SIZES[0] >> 10
    )
}

/// The devices of a layout's drives.
fn devices(layout: &Layout) -> Result<Vec<Device>> {
    let device = |drive: &crate::layout::Drive| match drive.folders.first() {
        Some(folder) => Device::of(folder),
        None => Err(Error::EmptyLayout),
    };
    layout.drives().iter().map(device).collect()
}

/// Seconds since 1970.
fn now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |now| now.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: u64 = 1_900_000_000;

    type Change = fn(&mut [Device; 3]);

    fn device(number: u64) -> Device {
        Device {
            number,
            name: Some(format!("nvme{number}n1")),
            disk: Some(format!("nvme{number}n1")),
            model: Some("FAST".into()),
            serial: Some(format!("S{number}")),
            size_bytes: Some(4_000_000_000_000),
        }
    }

    fn profile() -> Profile {
        let drive = |number| DriveProfile {
            device: device(number),
            speed: Some(DriveSpeed {
                alone: 7_100_000_000,
                together: 6_900_000_001,
                chunk_bytes: 1 << 20,
                depth: 4,
            }),
            problem: None,
        };
        let mut drives = vec![drive(0), drive(1), drive(2)];
        drives[1].speed = None;
        drives[1].problem = Some(too_short());
        Profile {
            version: VERSION,
            measured_at: NOW - 1000,
            backend: "io_uring".into(),
            drives,
            groups: vec![vec![0, 2]],
        }
    }

    fn devices() -> [Device; 3] {
        [0, 1, 2].map(device)
    }

    #[test]
    fn what_is_remembered_is_what_was_measured() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("drives.json");
        assert_eq!(Profile::remembered(&path, &devices(), NOW), Ok(None));
        let profile = profile();
        profile.remember(&path).unwrap();
        profile.remember(&path).unwrap();
        assert_eq!(Profile::remembered(&path, &devices(), NOW), Ok(Some(profile.clone())));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
        assert_eq!(
            (profile.depths(), profile.chunks()[1]),
            (vec![16, DEFAULT_DEPTH, 16], CHUNK_BYTES)
        );
        let tuning = profile.tuning();
        assert_eq!((tuning[0].rate, tuning[0].depth), (Some(6_900_000_001), Some(16)));
        assert_eq!((tuning.len(), tuning[1]), (3, DriveTuning::default()));
        assert_eq!((profile.shares_with(2), profile.shares_with(1)), (vec![0], vec![]));
        assert!(profile.remember(&folder.path().join("none/drives.json")).is_err());
    }

    /// A slow drive keeps the depth that was measured, a fast one as many reads as last, up to the most in flight.
    #[test]
    fn reads_in_flight_last_a_while() {
        let speed = |together| DriveSpeed {
            alone: together,
            together,
            chunk_bytes: 1 << 20,
            depth: 2,
        };
        assert_eq!(speed(100_000_000).patient_depth(), 2);
        assert_eq!(speed(1_000_000_000).patient_depth(), 10);
        assert_eq!(speed(14_000_000_000).patient_depth(), MOST_IN_FLIGHT >> 20);
    }

    #[test]
    fn changed_devices_and_old_age_drop_a_profile() {
        let profile = profile();
        let dropped = |change: Change, now: u64| {
            let mut devices = devices();
            change(&mut devices);
            profile.check(&devices, now).err()
        };
        assert_eq!(dropped(|_| {}, NOW), None);
        let changes: [Change; 4] = [
            |devices| devices[2].number = 77,
            |devices| devices[0].serial = Some("other".into()),
            |devices| devices[1].model = None,
            |devices| devices[1].size_bytes = Some(1),
        ];
        for (place, change) in changes.into_iter().enumerate() {
            let text = dropped(change, NOW).unwrap_or_default();
            assert!(text.contains("it was measured on nvme"), "change {place}: {text}");
        }
        assert_eq!(profile.check(&devices()[..2], NOW), Err("3 drives, now 2".into()));
        let limit = profile.measured_at + PROFILE_MAX_AGE.as_secs();
        assert_eq!(dropped(|_| {}, limit), None);
        assert_eq!(
            dropped(|_| {}, limit + 1),
            Some("30 days old, expected at most 30".into())
        );
        assert_eq!(
            dropped(|_| {}, profile.measured_at - 1),
            Some("it was measured in the future".into())
        );
    }

    #[test]
    fn nonsense_is_never_believed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("drives.json");
        let good = serde_json::to_string(&profile()).unwrap();
        let spoil = |from: &str, to: &str| {
            let spoilt = good.replacen(from, to, 1);
            assert_ne!(spoilt, good, "{from}");
            spoilt
        };
        let texts = [
            String::new(),
            "{}".into(),
            good[..good.len() - 1].into(),
            spoil("\"version\":1", "\"version\":2"),
            spoil("7100000000", "0"),
            spoil("7100000000", "-5"),
            spoil("7100000000", "71000000000000000"),
            spoil("1048576", "1048577"),
            spoil("\"depth\":4", "\"depth\":4000000"),
            spoil("[[0,2]]", "[[0,3]]"),
            spoil("[[0,2]]", "[[0,2],[1,2]]"),
            spoil("[[0,2]]", "[[2]]"),
            " ".repeat(MAX_PROFILE_BYTES as usize + 1),
        ];
        for text in texts {
            std::fs::write(&path, &text).unwrap();
            let found = Profile::remembered(&path, &devices(), NOW);
            assert!(found.is_err(), "{}", &text[..text.len().min(300)]);
        }
        std::fs::write(&path, good).unwrap();
        assert!(Profile::remembered(&path, &devices(), NOW).is_ok());
    }
}
