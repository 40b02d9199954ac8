//! The engine on paced drives: every byte that it accounts for is one that they served, and tokens are those of a plain folder.
#![cfg(target_os = "linux")]

use std::io::ErrorKind;
use std::path::Path;

use checkpoint::Checkpoint;
use drives::{DriveCounters, PAGE_BYTES};
use engine::{Cancel, Engine, NamedDrive, Options, Placement, greedy};
use paced_drive::{Command, Error, Pace, PacedDrive, available};

const TINY: &str = include_str!("../../../crates/checkpoint/testdata/k3-tiny-config.json");
const TOKENS: usize = 4;

fn tokens(engine: &mut Engine) -> Vec<u32> {
    let (mut sequence, cancel) = (engine.new_sequence(), Cancel::default());
    let mut ids = vec![3, 4, 5];
    for _ in 0..TOKENS {
        let fed = &ids[sequence.ids().len()..].to_vec();
        let logits = engine.prefill(&mut sequence, fed, &cancel, &mut |_| ()).unwrap();
        ids.push(greedy(&logits));
    }
    engine.settle();
    ids
}

fn open(model: &Path, placement: Placement) -> Engine {
    let options = Options {
        placement,
        cache: Some(0),
        ..Options::default()
    };
    Engine::open(Checkpoint::open(model).unwrap(), &options, &mut |_| ()).unwrap()
}

#[test]
fn served_bytes_are_the_account_and_a_failing_drive_changes_nothing() {
    if let Err(reason) = available() {
        println!("skipped: {reason}");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model");
    checkpoint::synthesize(TINY, 1, &model, false, &mut |_| ()).unwrap();
    let mut drives = Vec::new();
    for (name, rate) in [("a", 200e6), ("b", 100e6)] {
        let at = folder.path().join(name);
        std::fs::create_dir(&at).unwrap();
        let pace = Pace {
            rate,
            ..Pace::default()
        };
        match PacedDrive::mount(&model, &at, pace) {
            Ok(drive) => drives.push(drive),
            Err(Error::Mount { source, .. }) if source.kind() == ErrorKind::PermissionDenied => {
                println!("skipped: {source}");
                return;
            }
            Err(error) => panic!("{error}"),
        }
    }
    let expected = tokens(&mut open(&model, Placement::default()));
    let named = |drive: &PacedDrive| NamedDrive {
        path: drive.path().to_owned(),
        note: String::new(),
    };
    let mut engine = open(
        &model,
        Placement {
            drives: drives.iter().map(named).collect(),
            model_folder: false,
        },
    );
    let served = || -> Vec<u64> { drives.iter().map(|drive| drive.control().status().bytes).collect() };
    let before = served();
    assert_eq!(tokens(&mut engine), expected);
    // A page in which a file ends is counted whole and served up to that end.
    let ends = |drive: &DriveCounters| drive.reads * (PAGE_BYTES as u64 - 1);
    let mut of_engine = 0;
    for ((drive, before), after) in engine.streamer().drive_counters().iter().zip(before).zip(served()) {
        let served = after - before;
        let range = drive.bytes..=drive.device_bytes;
        assert!(range.contains(&served), "{served} bytes served, {range:?} counted");
        assert!(drive.device_bytes - served <= ends(drive));
        of_engine += drive.device_bytes;
    }
    assert_eq!(of_engine, engine.stats().device_bytes);

    drives[0].control().run(Command::Vanish);
    assert_eq!(tokens(&mut engine), expected);
    assert!(engine.streamer().counters().failed_reads > 0);
}
