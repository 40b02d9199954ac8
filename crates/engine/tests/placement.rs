//! Same logits wherever the experts lie, and a refusal for everything that is not this model.

mod common;

use checkpoint::Checkpoint;
use checkpoint::tiny::TINY_CONFIG;
use common::{Golden, plain_options};
use drives::{ExpertId, Notice, Notices, PackIndex};
use engine::{
    Cancel, Engine, ExpertSet, NamedDrive, Options, Part, PassRows, PlaceOptions, PlacePlan, PlaceReport, Placement,
    PlacementError, PlanLine, Reader, place,
};
use proptest::prelude::*;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use tempfile::TempDir;

/// Checksum chunks of the tests: experts have 13 or 14 pages.
const CHUNK: u32 = 8192;

/// A model whose experts are large enough to be split: 52,224 bytes each.
fn model() -> &'static Path {
    static MODEL: OnceLock<TempDir> = OnceLock::new();
    let made = || {
        let folder = tempfile::tempdir().unwrap();
        let mut config: serde_json::Value = serde_json::from_str(TINY_CONFIG).unwrap();
        config["text_config"]["moe_intermediate_size"] = 256.into();
        config["text_config"]["routed_expert_hidden_size"] = 128.into();
        checkpoint::synthesize(&config.to_string(), 5, folder.path(), false, &mut |_| ()).unwrap();
        folder
    };
    MODEL.get_or_init(made).path()
}

fn checkpoint() -> Checkpoint {
    Checkpoint::open(model()).unwrap()
}

const PROMPT: [u32; 7] = [3, 77, 410, 8, 8, 120, 33];

/// The bits of all logits of a prompt.
fn logits(engine: &mut Engine, ids: &[u32]) -> Vec<u32> {
    let mut sequence = engine.new_sequence();
    let all: Vec<usize> = (0..ids.len()).collect();
    let parts = &mut [PassRows {
        sequence: &mut sequence,
        ids,
    }];
    let logits = engine.pass(parts, &all, &Cancel::default(), None).unwrap();
    assert!(logits.iter().all(|logit| logit.is_finite()));
    logits.iter().map(|logit| logit.to_bits()).collect()
}

fn open(dir: &Path, placement: &Placement) -> Result<Engine, engine::Error> {
    let mut options = plain_options();
    options.placement = placement.clone();
    Engine::open(Checkpoint::open(dir).unwrap(), &options, &mut |_| ())
}

/// The logits through each reader. All must be the reference.
fn check_all_readers(placement: &Placement) {
    for reader in Reader::ALL {
        let options = Options {
            placement: placement.clone(),
            reader,
            ..plain_options()
        };
        let mut engine = Engine::open(checkpoint(), &options, &mut |_| ()).unwrap();
        assert!(logits(&mut engine, &PROMPT) == reference(), "{placement:?}, {reader}");
        let threads = engine.reader().contains("threads");
        assert!(threads || reader == Reader::Best, "{}", engine.reader());
    }
}

#[test]
fn one_drive_copies_weighted_and_split_packs_through_each_reader() {
    let checkpoint = checkpoint();
    let held = folders::<5>();
    let [a, b, c, d, mirror] = paths(&held);
    for shard in shards(model()) {
        copy_to(&shard, mirror);
    }
    let order = |_| (0..8).collect();
    let whole = PlaceOptions {
        only_packs: true,
        ..options()
    };
    let shares = [(a.to_path_buf(), 1.0), (b.to_path_buf(), 0.61)];
    run_plan(&PlacePlan::weighted(&checkpoint, &shares, &order), &whole).unwrap();
    let split = PlacePlan::split(&checkpoint, &[(c.to_path_buf(), 2.0), (d.to_path_buf(), 1.0)]);
    run_plan(&split, &whole).unwrap();
    for placement in [Placement::default(), with(&[mirror]), only(&[a, b]), only(&[c, d])] {
        check_all_readers(&placement);
    }
}

fn reference() -> &'static [u32] {
    static BITS: OnceLock<Vec<u32>> = OnceLock::new();
    BITS.get_or_init(|| logits(&mut open(model(), &Placement::default()).unwrap(), &PROMPT))
}

fn only(drives: &[&Path]) -> Placement {
    Placement {
        model_folder: false,
        ..Placement::of(drives.iter().map(|drive| drive.to_path_buf()))
    }
}

fn with(drives: &[&Path]) -> Placement {
    Placement::of(drives.iter().map(|drive| drive.to_path_buf()))
}

fn options() -> PlaceOptions {
    PlaceOptions {
        chunk_bytes: CHUNK,
        ..PlaceOptions::default()
    }
}

fn run_plan(plan: &PlacePlan, options: &PlaceOptions) -> Result<PlaceReport, PlacementError> {
    let mut go_on = |_: engine::PlaceProgress<'_>| ControlFlow::Continue(());
    place(&checkpoint(), plan, options, &Notices::default(), &mut go_on)
}

fn packs_in(folder: &Path) -> Vec<PathBuf> {
    let mut packs: Vec<PathBuf> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    packs.retain(|path| path.extension().is_some_and(|extension| extension == "pack"));
    packs.sort();
    packs
}

fn shards(dir: &Path) -> Vec<PathBuf> {
    let checkpoint = Checkpoint::open(dir).unwrap();
    checkpoint.shards().iter().map(|shard| shard.path.clone()).collect()
}

fn copy_to(file: &Path, folder: &Path) -> PathBuf {
    let copy = folder.join(file.file_name().unwrap());
    std::fs::copy(file, &copy).unwrap();
    copy
}

fn folders<const N: usize>() -> [TempDir; N] {
    std::array::from_fn(|_| tempfile::tempdir().unwrap())
}

fn paths<const N: usize>(folders: &[TempDir; N]) -> [&Path; N] {
    std::array::from_fn(|at| folders[at].path())
}

fn refusal(placement: &Placement) -> String {
    let text = match placement.survey(&checkpoint(), &Notices::default()) {
        Ok(_) => panic!("accepted"),
        Err(error) => error.to_string(),
    };
    assert!(!text.contains('\n'), "{text}");
    text
}

#[test]
fn a_copy_of_the_folder_and_a_part_of_it() {
    let held = folders::<2>();
    let [mirror, subset] = paths(&held);
    for (number, shard) in shards(model()).iter().enumerate() {
        copy_to(shard, mirror);
        if number % 2 == 0 {
            copy_to(shard, subset);
        }
    }
    for placement in [
        with(&[mirror]),
        with(&[subset]),
        with(&[mirror, subset]),
        only(&[mirror]),
    ] {
        let mut engine = open(model(), &placement).unwrap();
        assert!(logits(&mut engine, &PROMPT) == reference(), "{placement:?}");
    }
    let placed = with(&[mirror, subset])
        .survey(&checkpoint(), &Notices::default())
        .unwrap();
    let whole = checkpoint().sizes().experts;
    assert_eq!(placed.folders[0].expert_bytes, whole);
    assert_eq!(placed.folders[1].expert_bytes, whole);
    assert!(placed.folders[2].expert_bytes < whole && placed.folders[2].shards > 0);
    let layout = placed.layout;
    let homes = layout.experts().iter().map(|&id| layout.homes(id, 0).unwrap().len());
    assert!(homes.clone().all(|homes| (2..=3).contains(&homes)));
    assert!(homes.clone().any(|homes| homes == 2) && homes.clone().any(|homes| homes == 3));
}

#[test]
fn packs_in_every_arrangement_give_the_same_logits() {
    let checkpoint = checkpoint();
    let held = folders::<4>();
    let [a, b, c, d] = paths(&held);
    let order = |layer: u32| (0..8).map(|n| (n * 3 + layer) % 8).collect();
    let shares = [(a.to_path_buf(), 1.0), (b.to_path_buf(), 0.61), (c.to_path_buf(), 0.32)];
    let weighted = PlacePlan::weighted(&checkpoint, &shares, &order);
    let whole = PlaceOptions {
        only_packs: true,
        ..options()
    };
    run_plan(&weighted, &whole).unwrap();
    let mut engine = open(model(), &only(&[a, b, c])).unwrap();
    assert!(logits(&mut engine, &PROMPT) == reference(), "weighted packs alone");
    let stats = engine.stats();
    assert_eq!(stats.expert_bytes_checked, stats.expert_bytes_needed);
    let mut engine = open(model(), &with(&[a, b, c])).unwrap();
    assert!(
        logits(&mut engine, &PROMPT) == reference(),
        "weighted packs beside the model"
    );

    // One copy, split over two drives by speed, and beside it half of the experts whole on a third.
    let held = folders::<2>();
    let [e, f] = paths(&held);
    let split = PlacePlan::split(&checkpoint, &[(e.to_path_buf(), 13.6), (f.to_path_buf(), 7.1)]);
    run_plan(&split, &whole).unwrap();
    let half = PlacePlan::weighted(&checkpoint, &[(d.to_path_buf(), 0.5)], &order);
    run_plan(&half, &options()).unwrap();
    for placement in [only(&[e, f]), only(&[e, f, d]), with(&[f]), with(&[e, f, d])] {
        let mut engine = open(model(), &placement).unwrap();
        assert!(logits(&mut engine, &PROMPT) == reference(), "{placement:?}");
        assert!(engine.stats().expert_bytes_checked > 0);
    }
    let placed = only(&[e, f]).survey(&checkpoint, &Notices::default()).unwrap();
    let sum: u64 = placed.folders.iter().map(|folder| folder.expert_bytes).sum();
    assert_eq!(sum, checkpoint.sizes().experts, "one copy in all");
    let share = placed.folders[0].expert_bytes as f64 / sum as f64;
    assert!((share - 13.6 / 20.7).abs() < 0.05, "share {share}");
    // Each half alone lacks something of every expert.
    let text = refusal(&only(&[e]));
    assert!(text.contains("96 of 96 experts have no home"), "{text}");
}

#[test]
fn packs_of_a_golden_checkpoint_give_the_same_logits() {
    let golden = Golden::read("k3_a");
    let checkpoint = Checkpoint::open(&golden.dir).unwrap();
    let held = folders::<2>();
    let drives: Vec<(PathBuf, f64)> = paths(&held).iter().map(|path| (path.to_path_buf(), 1.0)).collect();
    let plan = PlacePlan::split(&checkpoint, &drives);
    let options = PlaceOptions {
        only_packs: true,
        chunk_bytes: 4096,
    };
    let mut go_on = |_: engine::PlaceProgress<'_>| ControlFlow::Continue(());
    place(&checkpoint, &plan, &options, &Notices::default(), &mut go_on).unwrap();
    let mut plain = open(&golden.dir, &Placement::default()).unwrap();
    let mut packed = open(&golden.dir, &only(&paths(&held))).unwrap();
    assert_eq!(logits(&mut packed, &golden.prompt), logits(&mut plain, &golden.prompt));
    assert_eq!(packed.stats().expert_bytes_needed, plain.stats().expert_bytes_needed);
    assert!(
        packed
            .folders()
            .iter()
            .all(|folder| folder.packs == 8 && folder.expert_bytes > 0)
    );
}

/// Two devices, where this machine has a second one for temporary files.
#[test]
fn split_ranges_are_read_from_both_devices() {
    let Ok(memory) = tempfile::tempdir_in("/dev/shm") else {
        eprintln!("skipped: there is no /dev/shm to be the second drive");
        return;
    };
    let disk = tempfile::tempdir().unwrap();
    let speeds = [(disk.path().to_path_buf(), 1.0), (memory.path().to_path_buf(), 1.0)];
    run_plan(&PlacePlan::split(&checkpoint(), &speeds), &options()).unwrap();
    let placement = only(&[disk.path(), memory.path()]);
    let layout = placement.survey(&checkpoint(), &Notices::default()).unwrap().layout;
    if layout.drives().len() == 1 {
        eprintln!("skipped: temporary files are on the same device as /dev/shm");
        return;
    }
    for &id in layout.experts() {
        let homes = layout.homes(id, 0).unwrap();
        assert_eq!(homes.len(), 2);
        assert_ne!(layout.drive_of(&homes[0]), layout.drive_of(&homes[1]));
    }
    let mut engine = open(model(), &placement).unwrap();
    assert!(logits(&mut engine, &PROMPT) == reference());
}

#[test]
fn links_and_folders_named_twice_add_nothing() {
    let held = folders::<2>();
    let [links, twice] = paths(&held);
    let all = shards(model());
    for (number, shard) in all.iter().enumerate() {
        let link = links.join(shard.file_name().unwrap());
        if number % 2 == 0 || std::fs::hard_link(shard, &link).is_err() {
            std::os::unix::fs::symlink(shard, link).unwrap();
        }
    }
    run_plan(&PlacePlan::mirror(&checkpoint(), &[twice.to_path_buf()]), &options()).unwrap();
    std::os::unix::fs::symlink(&packs_in(twice)[0], links.join("again.pack")).unwrap();
    let placement = with(&[links, model(), twice, twice, links]);
    let placed = placement.survey(&checkpoint(), &Notices::default()).unwrap();
    for &id in placed.layout.experts() {
        assert_eq!(placed.layout.homes(id, 0).unwrap().len(), 2, "{id}");
    }
    assert_eq!(placed.packs.len(), 12);
    let links: Vec<usize> = placed.folders.iter().map(|folder| folder.links).collect();
    assert_eq!(links, [0, all.len(), all.len(), 1, 12, all.len() + 1]);
    let mut engine = open(model(), &placement).unwrap();
    assert!(logits(&mut engine, &PROMPT) == reference());
}

#[test]
fn copies_that_differ_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let shard = &shards(model())[3];
    let copy = copy_to(shard, folder.path());
    let good = std::fs::read(shard).unwrap();
    let head = 8 + u64::from_le_bytes(good[..8].try_into().unwrap()) as usize;
    let flip = |at: usize| {
        let mut bytes = good.clone();
        bytes[at] ^= 1;
        bytes
    };
    for (bytes, found, expected) in [
        (
            good[..good.len() - 1].to_vec(),
            format!("{} bytes", good.len() - 1),
            good.len().to_string(),
        ),
        (
            flip(head - 2),
            "a header with checksum".into(),
            "as in the model's folder".into(),
        ),
        (
            flip(0),
            "a header with checksum".into(),
            "as in the model's folder".into(),
        ),
        (
            flip(good.len() - 1),
            "sampled weights".into(),
            "as in the model's folder".into(),
        ),
    ] {
        std::fs::write(&copy, bytes).unwrap();
        let text = refusal(&with(&[folder.path()]));
        let parts = [copy.to_str().unwrap(), &found, &expected, "copy the shard again"];
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
        let error = open(model(), &with(&[folder.path()])).err().unwrap();
        assert_eq!(error.to_string(), text);
    }
    std::fs::write(&copy, good).unwrap();
    with(&[folder.path()])
        .survey(&checkpoint(), &Notices::default())
        .unwrap();
}

#[test]
fn folders_without_the_model_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("README.md"), "not a drive").unwrap();
    std::fs::write(folder.path().join("a.pack.partial"), "being written").unwrap();
    let text = refusal(&with(&[folder.path()]));
    assert!(
        text.contains("found neither a shard of this model nor a pack"),
        "{text}"
    );
    let text = refusal(&with(&[Path::new("/none/here")]));
    assert!(text.starts_with("/none/here: cannot list"), "{text}");
    let text = refusal(&only(&[]));
    assert!(
        text.contains("96 of 96 experts have no home on any drive: 1/0, 1/1, 1/2, 1/3, 1/4 and 91 more"),
        "{text}"
    );
}

#[test]
fn experts_without_a_home_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let line = |layer: u32, experts: &str, part: Part| PlanLine {
        drive: folder.path().to_path_buf(),
        layer,
        experts: experts.parse().unwrap(),
        part,
    };
    let mut plan = PlacePlan::mirror(&checkpoint(), &[folder.path().to_path_buf()]);
    plan.lines.retain(|line| line.layer != 5);
    plan.lines.push(line(5, "0-2,4,6-7", Part::Whole));
    plan.lines.push(line(5, "3", Part::Share(0.0, 0.5)));
    let error = run_plan(
        &plan,
        &PlaceOptions {
            only_packs: true,
            ..options()
        },
    );
    let text = error.unwrap_err().to_string();
    assert!(
        text.contains("2 of 96 experts have no home on any drive: 5/3, 5/5;"),
        "{text}"
    );
    assert!(packs_in(folder.path()).is_empty(), "refused before anything is written");
    run_plan(&plan, &options()).unwrap();
    let text = refusal(&only(&[folder.path()]));
    assert!(
        text.contains("2 of 96 experts have no home on any drive: 5/3, 5/5;"),
        "{text}"
    );
    plan.lines = vec![line(5, "3", Part::Share(0.5, 1.0)), line(5, "5", Part::Whole)];
    run_plan(&plan, &options()).unwrap();
    assert_eq!(packs_in(folder.path()).len(), 13, "two packs of layer 5");
    let mut engine = open(model(), &only(&[folder.path()])).unwrap();
    assert!(logits(&mut engine, &PROMPT) == reference());
}

#[test]
fn packs_that_are_damaged_or_of_another_model_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut plan = PlacePlan::mirror(&checkpoint(), &[folder.path().to_path_buf()]);
    plan.lines.truncate(1);
    run_plan(&plan, &options()).unwrap();
    let pack = packs_in(folder.path()).remove(0);
    let good = std::fs::read(&pack).unwrap();
    for (at, what) in [
        (0, "expected a pack"),
        (20, "a header with checksum"),
        (4200, "an index with checksum"),
    ] {
        let mut bad = good.clone();
        bad[at] ^= 1;
        std::fs::write(&pack, bad).unwrap();
        let text = refusal(&with(&[folder.path()]));
        assert!(text.contains(pack.to_str().unwrap()) && text.contains(what), "{text}");
    }
    std::fs::write(&pack, &good).unwrap();

    // The same configuration, other weights.
    let other = tempfile::tempdir().unwrap();
    let config = std::fs::read_to_string(model().join("config.json")).unwrap();
    checkpoint::synthesize(&config, 6, other.path(), false, &mut |_| ()).unwrap();
    let other = Checkpoint::open(other.path()).unwrap();
    let error = with(&[folder.path()]).survey(&other, &Notices::default()).unwrap_err();
    let text = error.to_string();
    for part in [
        "made from another shard",
        "sampled weights",
        "place it again from this model",
    ] {
        assert!(text.contains(part), "{text}");
    }
    // Another model altogether.
    let golden = Checkpoint::open(&Golden::read("k3_a").dir).unwrap();
    let text = with(&[folder.path()])
        .survey(&golden, &Notices::default())
        .unwrap_err()
        .to_string();
    assert!(text.contains("expected only shards that the model has"), "{text}");
}

#[test]
fn plans_that_do_not_fit_the_model_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = |text: &str| {
        let plan = folder.path().join("plan.jsonl");
        std::fs::write(&plan, text).unwrap();
        plan
    };
    std::fs::create_dir(folder.path().join("b")).unwrap();
    std::fs::write(folder.path().join("file"), "").unwrap();
    let over = 52_224 + 1;
    for (text, expected) in [
        (
            r#"{"drive": "b", "layer": 0}"#.to_owned(),
            "plan line 1: found layer 0, expected a layer with experts, from 1 to 12",
        ),
        (r#"{"drive": "b", "layer": 13}"#.into(), "found layer 13"),
        (
            r#"{"drive": "b", "layer": 1, "experts": "5-8"}"#.into(),
            "found expert 8, expected at most 7",
        ),
        (
            format!(r#"{{"drive": "b", "layer": 1, "bytes": [0, {over}]}}"#),
            "ends beyond it, expected at most 52224 bytes",
        ),
        (
            concat!(
                r#"{"drive": "b", "layer": 1, "experts": "0-3", "share": [0, 0.5]}"#,
                "\n",
                r#"{"drive": "../b/b/../b", "layer": 1, "experts": "3", "share": [0.3, 0.9]}"#
            )
            .replace("../b/b/../b", "b/../b"),
            "expert 1/3 extent 0: bytes",
        ),
        (
            r#"{"drive": "c", "layer": 1}"#.into(),
            "c: cannot open the drive's folder",
        ),
        (
            r#"{"drive": "file", "layer": 1}"#.into(),
            "found a file, expected the folder of a drive",
        ),
    ] {
        let plan = PlacePlan::read(&path(&text)).unwrap();
        let error = run_plan(&plan, &options()).unwrap_err().to_string();
        assert!(error.contains(expected) && !error.contains('\n'), "{error}");
        assert!(error.starts_with(folder.path().to_str().unwrap()), "{error}");
        assert!(packs_in(&folder.path().join("b")).is_empty());
    }
    for (text, expected) in [
        ("", "line 1: found no line"),
        ("\n{", "line 2: found text that does not parse"),
        (r#"{"layer": 1}"#, "missing field `drive`"),
        (
            r#"{"drive": "b", "layer": 1, "shares": [0, 1]}"#,
            "unknown field `shares`",
        ),
        (
            r#"{"drive": "b", "layer": 1, "share": [0.5, 0.5]}"#,
            "expected 0 <= from < to <= 1",
        ),
        (
            r#"{"drive": "b", "layer": 1, "share": [0, 1.5]}"#,
            "expected 0 <= from < to <= 1",
        ),
        (r#"{"drive": "b", "layer": 1, "bytes": [9, 3]}"#, "expected from < to"),
        (
            r#"{"drive": "b", "layer": 1, "bytes": [0, 3], "share": [0, 1]}"#,
            "expected one of them",
        ),
        (
            r#"{"drive": "b", "layer": 1, "experts": "3-1"}"#,
            "expected numbers and ranges",
        ),
        (
            r#"{"drive": "b", "layer": 1, "experts": ""}"#,
            "expected numbers and ranges",
        ),
    ] {
        let error = PlacePlan::read(&path(text)).unwrap_err().to_string();
        assert!(error.contains(expected) && !error.contains('\n'), "{error}");
    }
    let plan = PlacePlan::mirror(&checkpoint(), &[folder.path().join("b")]);
    for chunk_bytes in [0, 5000] {
        let error = run_plan(
            &plan,
            &PlaceOptions {
                chunk_bytes,
                only_packs: false,
            },
        )
        .unwrap_err();
        assert!(
            error.to_string().contains("expected a positive multiple of 4096"),
            "{error}"
        );
    }
}

#[test]
fn a_plan_is_written_as_it_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let drives = [(folder.path().join("a"), 2.0), (folder.path().join("b"), 1.0)];
    let mut plan = PlacePlan::split(&checkpoint(), &drives);
    plan.lines.push(PlanLine {
        drive: folder.path().to_path_buf(),
        layer: 1,
        experts: ExpertSet::of(&[4, 1, 0, 2, 7]),
        part: Part::Bytes(0, 8192),
    });
    let path = folder.path().join("plan.jsonl");
    std::fs::write(&path, plan.to_json_lines()).unwrap();
    assert!(plan.to_json_lines().contains("\"0-2,4,7\""));
    assert_eq!(PlacePlan::read(&path).unwrap(), plan);
}

#[test]
fn the_same_plan_can_be_run_again() {
    let folder = tempfile::tempdir().unwrap();
    let plan = PlacePlan::mirror(&checkpoint(), &[folder.path().to_path_buf()]);
    let mut seen = Vec::new();
    let mut stop_in_third = |at: engine::PlaceProgress<'_>| {
        seen.push((at.written, at.verified, at.total));
        if at.written > 2 * 8 * 52_224 + 10 {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    };
    let error = place(
        &checkpoint(),
        &plan,
        &options(),
        &Notices::default(),
        &mut stop_in_third,
    )
    .unwrap_err();
    assert!(error.to_string().contains("stopped before it was complete"), "{error}");
    let all = checkpoint().sizes().experts;
    assert!(seen.iter().all(|at| at.1 <= at.0 && at.0 <= at.2 && at.2 == all));
    assert_eq!(
        std::fs::read_dir(folder.path()).unwrap().count(),
        2,
        "two packs and nothing else"
    );
    let report = run_plan(&plan, &options()).unwrap();
    assert_eq!((report.written.len(), report.kept.len()), (10, 2));
    assert_eq!(report.bytes, all / 12 * 10);
    let report = run_plan(&plan, &options()).unwrap();
    assert_eq!((report.written.len(), report.kept.len(), report.bytes), (0, 12, 0));
}

const KILLED_FOLDER: &str = "PLACEMENT_TEST_KILLED_FOLDER";

/// Not a test of its own: the process that [`a_killed_run_leaves_only_what_the_next_one_replaces`] kills.
#[test]
fn the_process_that_is_killed() {
    let Some(folder) = std::env::var_os(KILLED_FOLDER) else {
        return;
    };
    let plan = PlacePlan::mirror(&checkpoint(), &[PathBuf::from(folder)]);
    let mut die = |at: engine::PlaceProgress<'_>| {
        if at.written > 3 * 8 * 52_224 + 10 {
            // No destructor runs, as under SIGKILL.
            std::process::abort();
        }
        ControlFlow::Continue(())
    };
    let _ = place(&checkpoint(), &plan, &options(), &Notices::default(), &mut die);
}

#[test]
fn a_killed_run_leaves_only_what_the_next_one_replaces() {
    let folder = tempfile::tempdir().unwrap();
    let status = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "the_process_that_is_killed"])
        .env(KILLED_FOLDER, folder.path())
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .status()
        .unwrap();
    assert!(!status.success());
    let names: Vec<String> = std::fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    let partial = |name: &&String| name.ends_with(".pack.partial");
    assert_eq!((names.len(), names.iter().filter(partial).count()), (4, 1), "{names:?}");
    // Unfinished packs are no homes.
    let placed = with(&[folder.path()])
        .survey(&checkpoint(), &Notices::default())
        .unwrap();
    assert_eq!(placed.packs.len(), 3);
    let plan = PlacePlan::mirror(&checkpoint(), &[folder.path().to_path_buf()]);
    let report = run_plan(&plan, &options()).unwrap();
    assert_eq!((report.written.len(), report.kept.len()), (9, 3));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 12);
    let mut engine = open(model(), &only(&[folder.path()])).unwrap();
    assert!(logits(&mut engine, &PROMPT) == reference());
}

#[test]
fn too_little_space_is_refused_before_anything_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let mount = |what: &[&str]| std::process::Command::new(what[0]).args(&what[1..]).output();
    let path = folder.path().to_str().unwrap();
    let mounted = mount(&["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", path]);
    if !mounted.is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: a small drive for this test needs root, to mount a tmpfs");
        return;
    }
    let plan = PlacePlan::mirror(&checkpoint(), &[folder.path().to_path_buf()]);
    let outcome = run_plan(&plan, &options());
    let left = std::fs::read_dir(folder.path()).unwrap().count();
    let mut one = plan.clone();
    one.lines.truncate(1);
    let fits = run_plan(&one, &options());
    mount(&["umount", path]).unwrap();
    let Err(PlacementError::NoSpace { needed, free, .. }) = outcome else {
        panic!("{outcome:?}");
    };
    assert!(needed > 5_000_000 && free <= 1 << 20, "{needed} of {free}");
    assert_eq!(left, 0);
    assert_eq!(fits.unwrap().written.len(), 1, "what fits is placed");
}

/// Flips a byte of the first range of expert `id` in the pack that holds it.
fn damage(folder: &Path, id: ExpertId) -> PathBuf {
    for path in packs_in(folder) {
        let index = PackIndex::open(&path, &Notices::default()).unwrap();
        if let Some(range) = index.contents().ranges().iter().find(|range| range.expert == id) {
            let mut bytes = std::fs::read(&path).unwrap();
            bytes[(range.offset + range.len / 2) as usize] ^= 0x55;
            std::fs::write(&path, bytes).unwrap();
            return path;
        }
    }
    panic!("no pack holds {id}");
}

#[test]
fn corruption_is_never_served() {
    let held = folders::<2>();
    let [a, b] = paths(&held);
    let drives = [a.to_path_buf(), b.to_path_buf()];
    run_plan(&PlacePlan::mirror(&checkpoint(), &drives), &options()).unwrap();
    // Of each expert of two layers one copy is bad: whichever drive is read first gives bad bytes somewhere.
    let mut files = Vec::new();
    for (layer, folder) in [(3, a), (9, b)] {
        for expert in 0..8 {
            files.push(damage(folder, ExpertId { layer, expert }));
        }
    }
    let mut engine = open(model(), &only(&[a, b])).unwrap();
    assert!(
        logits(&mut engine, &PROMPT) == reference(),
        "read again from the other copy"
    );
    let notices = engine.notices();
    let corrupt: Vec<&Notice> = notices
        .iter()
        .filter(|notice| matches!(notice, Notice::Corrupt { .. }))
        .collect();
    assert!(!corrupt.is_empty());
    for notice in corrupt {
        let text = notice.to_string();
        assert!(files.iter().any(|file| text.contains(file.to_str().unwrap())), "{text}");
    }

    // Without another copy the run stops.
    let mut engine = open(model(), &only(&[a])).unwrap();
    let mut sequence = engine.new_sequence();
    let parts = &mut [PassRows {
        sequence: &mut sequence,
        ids: &PROMPT,
    }];
    let error = engine.pass(parts, &[0], &Cancel::default(), None).unwrap_err();
    let text = error.to_string();
    for part in [
        "expert 3/",
        "none of its 1 homes",
        "have checksum",
        "place the pack again",
    ] {
        assert!(text.contains(part), "{text}");
    }

    // A checksum holds for the same bytes wherever they are: here for a bad copy of a shard, which is read first, being named first.
    let copies = tempfile::tempdir().unwrap();
    let place = checkpoint().expert(3, 1).unwrap();
    let shard = &shards(model())[place.extents()[0].shard];
    let copy = copy_to(shard, copies.path());
    let mut bytes = std::fs::read(&copy).unwrap();
    for expert in 0..8 {
        let extent = checkpoint().expert(3, expert).unwrap().extents()[0];
        bytes[(extent.offset + extent.len / 3) as usize] ^= 2;
    }
    std::fs::write(&copy, bytes).unwrap();
    let mut engine = open(model(), &only(&[copies.path(), b, a])).unwrap();
    assert!(logits(&mut engine, &PROMPT) == reference());
    let notices = engine.notices();
    assert!(
        notices
            .iter()
            .any(|notice| notice.to_string().contains(copy.to_str().unwrap())),
        "{notices:?}"
    );

    // Unchecked, the bad bytes are used: what the option is for, and that the test sees them.
    let mut options = plain_options();
    options.placement = only(&[a]);
    options.check = false;
    let mut engine = Engine::open(checkpoint(), &options, &mut |_| ()).unwrap();
    assert!(logits(&mut engine, &PROMPT) != reference());
    assert_eq!(engine.stats().expert_bytes_checked, 0);
}

#[test]
fn a_layout_file_says_the_same_as_the_drives_it_lists() {
    let folder = tempfile::tempdir().unwrap();
    let drive = folder.path().join("drive");
    std::fs::create_dir(&drive).unwrap();
    run_plan(
        &PlacePlan::mirror(&checkpoint(), std::slice::from_ref(&drive)),
        &options(),
    )
    .unwrap();
    let file = folder.path().join("layout.json");
    let text = r#"{"version": 1, "model_folder": false, "drives": [{"path": "drive", "note": "slot 1"}]}"#;
    std::fs::write(&file, text).unwrap();
    let placement = Placement::read(&file).unwrap();
    let note = "slot 1".to_owned();
    assert_eq!(placement.drives, [NamedDrive { path: drive, note }]);
    let mut engine = open(model(), &placement).unwrap();
    assert!(logits(&mut engine, &PROMPT) == reference());
    assert_eq!(engine.folders()[0].note, "slot 1");
}

/// For each of three drives and each of 12 layers: nothing, or some experts and a part of them.
fn any_plan() -> impl Strategy<Value = Vec<(usize, u32, Vec<u32>, u8, u8)>> {
    let line = (
        0..3usize,
        1..13u32,
        proptest::collection::vec(0..8u32, 1..9),
        0..16u8,
        1..17u8,
    );
    proptest::collection::vec(line, 1..40)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    /// Any plan without overlaps can be placed, and gives the same logits beside the model's folder; alone it does so exactly when every
    /// expert is covered.
    #[test]
    fn any_plan_gives_the_same_logits(lines in any_plan(), chunk in 1u32..5) {
        let held = folders::<3>();
        let drives = paths(&held);
        // What is asked for twice in one folder is left out the second time.
        let mut taken = std::collections::HashSet::new();
        let mut plan = PlacePlan::default();
        for (drive, layer, mut experts, from, to) in lines {
            let (from, to) = (from.min(to - 1), to.max(from + 1));
            experts.retain(|&expert| taken.insert((drive, layer, expert)));
            let part = match (from, to) {
                (0, 16) => Part::Whole,
                (from, to) if from % 2 == 0 => Part::Share(f64::from(from) / 16.0, f64::from(to) / 16.0),
                (from, to) => Part::Bytes(u64::from(from) * 3264, u64::from(to) * 3264),
            };
            let drive = drives[drive].to_path_buf();
            if !experts.is_empty() {
                plan.lines.push(PlanLine { drive, layer, experts: ExpertSet::of(&experts), part });
            }
        }
        let options = PlaceOptions { only_packs: false, chunk_bytes: chunk * 4096 };
        let report = run_plan(&plan, &options).unwrap();
        let used: Vec<&Path> = drives.into_iter().filter(|drive| !packs_in(drive).is_empty()).collect();
        prop_assert_eq!(report.written.len(), used.iter().map(|drive| packs_in(drive).len()).sum::<usize>());
        let mut engine = open(model(), &with(&used)).unwrap();
        prop_assert!(logits(&mut engine, &PROMPT) == reference());
        let alone = only(&used).survey(&checkpoint(), &Notices::default());
        let covered = run_plan(&plan, &PlaceOptions { only_packs: true, ..options });
        prop_assert_eq!(alone.is_ok(), covered.is_ok());
        if alone.is_ok() {
            let mut engine = open(model(), &only(&used)).unwrap();
            prop_assert!(logits(&mut engine, &PROMPT) == reference());
        }
    }

    /// Cutting every expert at any places, in any order over three drives, is one whole copy.
    #[test]
    fn any_split_is_one_copy(cuts in proptest::collection::vec(0.0f64..1.0, 2), turn in 0..3usize, chunk in 1u32..5) {
        let held = folders::<3>();
        let drives = paths(&held);
        let (low, high) = (cuts[0].min(cuts[1]), cuts[0].max(cuts[1]));
        let speeds: Vec<(PathBuf, f64)> = [low, high - low, 1.0 - high]
            .into_iter()
            .enumerate()
            .map(|(number, speed)| (drives[(number + turn) % 3].to_path_buf(), speed))
            .collect();
        let options = PlaceOptions { only_packs: true, chunk_bytes: chunk * 4096 };
        run_plan(&PlacePlan::split(&checkpoint(), &speeds), &options).unwrap();
        let used: Vec<&Path> = drives.into_iter().filter(|drive| !packs_in(drive).is_empty()).collect();
        let mut engine = open(model(), &only(&used)).unwrap();
        prop_assert!(logits(&mut engine, &PROMPT) == reference());
        let sum: u64 = engine.folders().iter().map(|folder| folder.expert_bytes).sum();
        prop_assert_eq!(sum, checkpoint().sizes().experts);
        let stats = engine.stats();
        prop_assert_eq!(stats.expert_bytes_checked, stats.expert_bytes_needed);
    }
}
