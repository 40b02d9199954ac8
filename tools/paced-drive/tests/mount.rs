//! A mounted drive from outside. Skips, with a message, where FUSE cannot be used.
#![cfg(target_os = "linux")]

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use paced_drive::{CONTROL_NAME, Command, Error, Pace, PacedDrive, available};
use tempfile::TempDir;

const MIB: usize = 1 << 20;
/// "No such device" and "input/output error".
const ENODEV: i32 = 19;
const EIO: i32 = 5;

/// Bytes that tell their place.
fn content(len: usize) -> Vec<u8> {
    (0..len as u64 / 8 + 1)
        .flat_map(|i| (i * 0x9E37_79B9).to_le_bytes())
        .take(len)
        .collect()
}

struct Mounted {
    drive: PacedDrive,
    at: TempDir,
    _source: TempDir,
}

impl Mounted {
    fn path(&self, name: &str) -> PathBuf {
        self.at.path().join(name)
    }

    fn open(&self, name: &str) -> File {
        File::open(self.path(name)).unwrap()
    }
}

/// A drive with the file `a` of 8 MiB and a bit and the file `b`; `None` where there is no FUSE.
fn mount(mb_per_s: f64) -> Option<Mounted> {
    if let Err(reason) = available() {
        println!("skipped: {reason}");
        return None;
    }
    let (source, at) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    fs::write(source.path().join("a"), content(8 * MIB + 77)).unwrap();
    fs::write(source.path().join("b"), "bytes").unwrap();
    let pace = Pace {
        rate: mb_per_s * 1e6,
        latency_ns: 0,
    };
    match PacedDrive::mount(source.path(), at.path(), pace) {
        Ok(drive) => Some(Mounted {
            drive,
            at,
            _source: source,
        }),
        Err(Error::Mount { source, .. }) if source.kind() == ErrorKind::PermissionDenied => {
            println!("skipped: {source}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn files_are_served_as_they_are_and_read_only() {
    let Some(mounted) = mount(2000.0) else { return };
    assert_eq!(fs::read(mounted.path("a")).unwrap(), content(8 * MIB + 77));
    assert_eq!(fs::read(mounted.path("b")).unwrap(), b"bytes");
    assert_eq!(mounted.drive.control().status().bytes, 8 * MIB as u64 + 82);
    let mut names: Vec<_> = mounted
        .at
        .path()
        .read_dir()
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    names.sort();
    assert_eq!(names, ["a", "b", CONTROL_NAME]);
    let found = mounted.path("a").metadata().unwrap();
    assert!(found.blocks() * 512 > found.len() / 2, "a dense file looks dense");
    assert_eq!(File::open(mounted.path("x")).unwrap_err().kind(), ErrorKind::NotFound);
    assert!(fs::write(mounted.path("b"), "other").is_err());
    assert!(fs::write(mounted.path("new"), "other").is_err());
    assert!(fs::remove_file(mounted.path("a")).is_err());
    let mut beyond = [1; 10];
    assert_eq!(mounted.open("b").read_at(&mut beyond, 3).unwrap(), 2);
    assert_eq!(mounted.open("b").read_at(&mut beyond, 5).unwrap(), 0);
}

#[test]
fn each_mount_is_a_device() {
    let (Some(one), Some(other)) = (mount(100.0), mount(100.0)) else {
        return;
    };
    assert_ne!(
        one.at.path().metadata().unwrap().dev(),
        other.at.path().metadata().unwrap().dev()
    );
    assert_eq!(
        one.at.path().metadata().unwrap().dev(),
        one.path("a").metadata().unwrap().dev()
    );
}

#[test]
fn reads_take_their_time_however_many_wait() {
    let Some(mounted) = mount(100.0) else { return };
    let start = Instant::now();
    std::thread::scope(|scope| {
        for part in 0..8 {
            let file = mounted.open("a");
            scope.spawn(move || {
                let mut buffer = vec![0; MIB];
                file.read_exact_at(&mut buffer, (part * MIB) as u64).unwrap();
                assert_eq!(buffer, content(8 * MIB)[part * MIB..][..MIB]);
            });
        }
    });
    let least = Duration::from_secs_f64(8.0 * MIB as f64 / 100e6);
    assert!(start.elapsed() >= least, "{:?}", start.elapsed());
    assert_eq!(mounted.drive.control().status().bytes, 8 * MIB as u64);
}

#[test]
fn speed_changes_through_the_control_file() {
    let Some(mounted) = mount(2000.0) else { return };
    let control = mounted.path(CONTROL_NAME);
    fs::write(&control, "rate 20\nlatency 1000\n").unwrap();
    let start = Instant::now();
    mounted.open("a").read_exact_at(&mut vec![0; MIB], 0).unwrap();
    assert!(start.elapsed() >= Duration::from_secs_f64(MIB as f64 / 20e6 + 1e-3));
    let status: serde_json::Value = serde_json::from_slice(&fs::read(&control).unwrap()).unwrap();
    assert_eq!(status["rate"], 20e6);
    assert_eq!(status["bytes"], MIB as u64);
    // A wrong line changes nothing, nor do the right ones beside it.
    let wrong = File::options()
        .write(true)
        .open(&control)
        .unwrap()
        .write_all(b"rate 40\nfly\n");
    assert_eq!(wrong.unwrap_err().kind(), ErrorKind::InvalidInput);
    assert_eq!(mounted.drive.control().status().rate, 20e6);
}

#[test]
fn faults() {
    let Some(mounted) = mount(2000.0) else { return };
    let (file, control) = (mounted.open("a"), mounted.drive.control());
    let read = || file.read_exact_at(&mut vec![0; 4096], 0);
    read().unwrap();
    control.run(Command::Fail(2));
    for _ in 0..2 {
        assert_eq!(read().unwrap_err().raw_os_error(), Some(EIO));
    }
    read().unwrap();

    let start = Instant::now();
    control.run(Command::Stall(50_000_000));
    read().unwrap();
    assert!(start.elapsed() >= Duration::from_millis(50));

    control.run(Command::Vanish);
    assert_eq!(read().unwrap_err().raw_os_error(), Some(ENODEV));
    assert!(File::open(mounted.path("b")).is_err());
    assert!(
        fs::read_to_string(mounted.path(CONTROL_NAME))
            .unwrap()
            .contains("\"present\":false")
    );
    fs::write(mounted.path(CONTROL_NAME), "return").unwrap();
    read().unwrap();
    let status = control.status();
    assert_eq!((status.reads, status.failed), (4, 3));
}

#[test]
fn what_waits_ends_when_the_drive_vanishes() {
    let Some(mounted) = mount(0.001) else { return };
    let (file, control) = (mounted.open("a"), mounted.drive.control());
    // At a kilobyte a second this read would take a quarter of an hour.
    let waiting = std::thread::spawn(move || file.read_exact_at(&mut vec![0; MIB], 0));
    while control.status().waiting == 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    control.run(Command::Vanish);
    assert_eq!(waiting.join().unwrap().unwrap_err().raw_os_error(), Some(ENODEV));
}
