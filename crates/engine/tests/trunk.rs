//! The int8 trunk: converted once, whole or not at all, noticed when damaged, and the numbers that its integers stand for.

mod common;
mod plain;

use checkpoint::Checkpoint;
use common::{Golden, assert_same, bits, fed, largest_difference, plain_options, tiny};
use engine::{
    Cancel, Engine, Error, Isa, LoadPhase, MemoryPlan, Options, PrefixLimits, PrefixStore, Session, Trunk, TrunkError,
    TrunkFormat, Wishes,
};
use plain::Plain;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

const IDS: [u32; 20] = [3, 1, 4, 1, 5, 9, 2, 6, 5, 35, 8, 97, 93, 23, 84, 62, 64, 33, 83, 27];
/// What f32 and the order of its sums may move the tiny model's logits by, as in `mistakes.rs`.
const TOLERANCE: f64 = 2e-4;
/// The tiny model's shard and, in it, a byte of a sampled page (the first of the data, in lm_head).
const SHARD: &str = checkpoint::tiny::TINY_SHARD;

fn int8(folder: &Path) -> Options {
    Options {
        trunk: Trunk::Int8 {
            folder: Some(folder.to_path_buf()),
        },
        ..plain_options()
    }
}

/// An engine, its notices, and the phases that opening it went through.
fn opened(dir: &Path, options: &Options) -> Result<(Engine, Vec<String>, Vec<LoadPhase>), Error> {
    let mut phases = vec![];
    let engine = Engine::open(Checkpoint::open(dir).unwrap(), options, &mut |at| {
        assert!(at.done <= at.of, "{at:?}");
        if phases.last() != Some(&at.phase) {
            phases.push(at.phase);
        }
    })?;
    let notices = engine.notices().iter().map(ToString::to_string).collect();
    Ok((engine, notices, phases))
}

fn failure(dir: &Path, options: &Options) -> String {
    opened(dir, options).err().expect("an error").to_string()
}

/// The logits after each of `ids`, by an engine that is opened for it.
fn logits(dir: &Path, options: &Options, ids: &[u32]) -> Vec<u32> {
    let (mut engine, ..) = opened(dir, options).unwrap();
    fed(&mut engine, ids, &[ids.len()])
}

/// The one file in a folder.
fn only(folder: &Path) -> PathBuf {
    let files: Vec<PathBuf> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    let [file] = &files[..] else { panic!("{files:?}") };
    file.clone()
}

fn floats(bits: Vec<u32>) -> Vec<f32> {
    bits.into_iter().map(f32::from_bits).collect()
}

#[test]
fn logits_are_those_of_the_numbers_that_the_integers_stand_for() {
    let (dir, folder) = (tiny(), tempfile::tempdir().unwrap());
    let got = floats(logits(dir.path(), &int8(folder.path()), &IDS));
    let plain = Plain::read(&Checkpoint::open(dir.path()).unwrap(), None);
    let exact: Vec<f32> = plain.run(&IDS).logits.concat().iter().map(|x| *x as f32).collect();
    let run = plain.in_int8().run(&IDS);
    let want: Vec<f32> = run.logits.concat().iter().map(|x| *x as f32).collect();
    let worst = largest_difference(&got, &want) as f64;
    let effect = largest_difference(&got, &exact) as f64;
    println!(
        "tiny int8: {worst:e} from the plain model, {effect:e} from bf16, router margin {:e}",
        run.router_margin
    );
    assert!(worst < TOLERANCE, "{worst}");
    // It is another model, and not far from the first.
    assert!(effect > 10.0 * TOLERANCE, "{effect}");
}

#[test]
fn the_same_bits_in_any_company() {
    for name in ["k3_a", "k3_b"] {
        let (golden, folder) = (Golden::read(name), tempfile::tempdir().unwrap());
        let ids = &golden.long_prompt[..70];
        let exact = logits(&golden.dir, &plain_options(), ids);
        let want = logits(&golden.dir, &int8(folder.path()), ids);
        assert_ne!(want, exact, "{name}: nothing was converted");
        for isa in Isa::available() {
            for threads in [1, 3] {
                let options = Options {
                    isa,
                    threads,
                    ..int8(folder.path())
                };
                let (mut engine, ..) = opened(&golden.dir, &options).unwrap();
                let cut: &[usize] = if isa == Isa::Plain { &[61, 1, 2] } else { &[1] };
                assert_same(
                    &fed(&mut engine, ids, cut),
                    &want,
                    &format!("{name}, {isa}, {threads} threads"),
                );
            }
        }
    }
}

#[test]
fn it_is_converted_once_to_the_same_bytes_by_any_number_of_threads() {
    let (dir, folders) = (tiny(), [1, 5].map(|threads| (threads, tempfile::tempdir().unwrap())));
    let mut files = vec![];
    for (threads, folder) in &folders {
        let folder = folder.path().join("made/if/need/be");
        let options = Options {
            threads: *threads,
            ..int8(&folder)
        };
        let (engine, notices, phases) = opened(dir.path(), &options).unwrap();
        assert_eq!(engine.trunk(), TrunkFormat::Int8);
        assert_eq!(phases, [LoadPhase::Convert, LoadPhase::Load]);
        assert!(
            notices.iter().any(|n| n.contains("converted to int8 once")),
            "{notices:?}"
        );
        let (_, notices, phases) = opened(dir.path(), &options).unwrap();
        assert_eq!(phases, [LoadPhase::Load]);
        assert!(!notices.iter().any(|n| n.contains("trunk")), "{notices:?}");
        files.push(fs::read(only(&folder)).unwrap());
    }
    assert!(files[0] == files[1]);
    // Nothing was written to the model's folder.
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 3);
}

#[test]
fn the_plan_counts_what_is_read() {
    let (dir, folder) = (tiny(), tempfile::tempdir().unwrap());
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let bytes = |format| engine::trunk_bytes(checkpoint.schema(), format);
    let mut read = 0;
    let engine = Engine::open(Checkpoint::open(dir.path()).unwrap(), &int8(folder.path()), &mut |at| {
        if at.phase == LoadPhase::Load {
            read = at.done;
            assert!(at.of >= at.done);
        }
    });
    assert_eq!(engine.unwrap().plan().trunk, bytes(TrunkFormat::Int8));
    // Pages, and vectors that become f32 in memory.
    assert!(
        read < bytes(TrunkFormat::Int8) && read * 10 > bytes(TrunkFormat::Int8) * 6,
        "{read}"
    );
    // What the trunk leaves, the experts' cache gets.
    let (config, schema, slot) = (checkpoint.config(), checkpoint.schema(), 64 << 10);
    let wishes = |budget, trunk| Wishes {
        budget,
        positions: 64,
        sequences: 1,
        pass_rows: 1,
        all_logits: false,
        slots: Some(1),
        threads: 1,
        kv: engine::KvFormat::F32,
        trunk,
        cache: None,
    };
    let budget = MemoryPlan::least(config, schema, slot, &wishes(0, TrunkFormat::Bf16)).total();
    let plan = |trunk| MemoryPlan::new(config, schema, slot, &wishes(budget, trunk)).unwrap();
    let [exact, int8] = TrunkFormat::ALL.map(plan);
    let spared = exact.trunk - int8.trunk;
    assert!(spared * 10 > exact.trunk * 4, "{spared} of {}", exact.trunk);
    assert_eq!((exact.cache_slots, int8.cache_slots), (0, (spared / slot) as usize));
    assert!(int8.to_string().contains("int8, not weight-exact") && !exact.to_string().contains("int8"));
}

#[test]
fn damage_is_noticed_and_mended() {
    let (dir, folder) = (tiny(), tempfile::tempdir().unwrap());
    let options = int8(folder.path());
    let want = logits(dir.path(), &options, &IDS);
    let path = only(folder.path());
    let sound = fs::read(&path).unwrap();
    // A byte of the first tensor, of one in the middle, and of the last one's scales.
    let last = sound.iter().rposition(|&b| b != 0).unwrap();
    let data = u64::from_le_bytes(sound[24..32].try_into().unwrap()) as usize;
    for at in [data, sound.len() / 2, last] {
        let mut bytes = sound.clone();
        bytes[at] ^= 0x10;
        fs::write(&path, bytes).unwrap();
        let (mut engine, notices, phases) = opened(dir.path(), &options).unwrap();
        assert_same(&fed(&mut engine, &IDS, &[20]), &want, &format!("byte {at}"));
        assert_eq!(phases, [LoadPhase::Load]);
        let said = notices.iter().find(|n| n.contains("found checksum")).expect("a notice");
        assert!(
            said.contains("mended from the model's weights") && said.contains("tensor "),
            "{said}"
        );
        assert!(fs::read(&path).unwrap() == sound, "byte {at} is mended");
    }
    // Header, index, length, another version: the whole file is made again.
    type Change = fn(&mut Vec<u8>);
    let changes: [(Change, &str); 7] = [
        (|b| b.truncate(100), "found 100 bytes"),
        (|b| b.truncate(b.len() - 1), "a length in bytes of"),
        (|b| b.push(0), "a length in bytes of"),
        (|b| b[0] = b'X', "another kind of file"),
        (|b| b[8] = 9, "format version 9, expected 1"),
        (|b| b[20] ^= 1, "checksum"),
        (|b| b[4200] ^= 1, "of the index"),
    ];
    for (change, words) in changes {
        let mut bytes = sound.clone();
        change(&mut bytes);
        fs::write(&path, bytes).unwrap();
        let (mut engine, notices, phases) = opened(dir.path(), &options).unwrap();
        assert_eq!(phases, [LoadPhase::Convert, LoadPhase::Load], "{words}");
        let said = notices
            .iter()
            .find(|n| n.contains("converted again"))
            .expect("a notice");
        assert!(said.contains(words) && said.contains(path.to_str().unwrap()), "{said}");
        assert_same(&fed(&mut engine, &IDS, &[20]), &want, words);
        assert!(fs::read(&path).unwrap() == sound, "{words}");
    }
}

#[test]
fn another_model_in_the_same_folder_is_converted_again() {
    let (dir, folder) = (tiny(), tempfile::tempdir().unwrap());
    let options = int8(folder.path());
    let old = logits(dir.path(), &options, &IDS);
    let old_path = only(folder.path());
    // A copy of the model elsewhere uses the same file.
    let copy = tiny();
    assert_eq!(opened(copy.path(), &options).unwrap().2, [LoadPhase::Load]);
    // Other weights: the second half of lm_head's first numbers, which are the first of the data and so in the sample.
    let shard = dir.path().join(SHARD);
    let mut bytes = fs::read(&shard).unwrap();
    let data = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    bytes[data + 1] ^= 0x80;
    fs::write(&shard, bytes).unwrap();
    let (mut engine, notices, phases) = opened(dir.path(), &options).unwrap();
    assert_eq!(phases, [LoadPhase::Convert, LoadPhase::Load]);
    assert!(
        notices
            .iter()
            .any(|n| n.contains("removed, since it was made of another model")),
        "{notices:?}"
    );
    assert_ne!(fed(&mut engine, &IDS, &[20]), old);
    assert_ne!(only(folder.path()), old_path);
}

/// A change that the sample does not see shows when a tensor has to be made again.
#[test]
fn what_the_sample_missed_is_not_mended_with_other_weights() {
    let (dir, folder) = (tiny(), tempfile::tempdir().unwrap());
    let options = int8(folder.path());
    opened(dir.path(), &options).unwrap();
    let path = only(folder.path());
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let info = checkpoint.tensor("model.layers.0.mlp.up_proj.weight").unwrap();
    let shard = dir.path().join(SHARD);
    let mut bytes = fs::read(&shard).unwrap();
    bytes[info.offset as usize + 1] ^= 0x80;
    fs::write(&shard, bytes).unwrap();
    opened(dir.path(), &options).unwrap();
    // All tensors of the file are damaged, so that one also is.
    let mut bytes = fs::read(&path).unwrap();
    let data = u64::from_le_bytes(bytes[24..32].try_into().unwrap()) as usize;
    bytes[data..].iter_mut().for_each(|b| *b ^= 1);
    fs::write(&path, bytes).unwrap();
    let error = failure(dir.path(), &options);
    assert!(
        error.contains("mlp.up_proj.weight") && error.contains("delete the file"),
        "{error}"
    );
}

#[test]
fn weights_that_are_no_numbers_are_named() {
    let (dir, folder) = (tiny(), tempfile::tempdir().unwrap());
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let info = *checkpoint.tensor("model.layers.3.self_attn.q_b_proj.weight").unwrap();
    let cols = info.shape.dims()[1] as usize;
    let shard = dir.path().join(SHARD);
    let mut bytes = fs::read(&shard).unwrap();
    for (row, column) in [(7, 2), (5, 3)] {
        let at = info.offset as usize + 2 * (row * cols + column);
        bytes[at..at + 2].copy_from_slice(&0x7f80u16.to_le_bytes());
    }
    fs::write(&shard, bytes).unwrap();
    for threads in [1, 4] {
        let options = Options {
            threads,
            ..int8(folder.path())
        };
        let error = failure(dir.path(), &options);
        for part in [
            SHARD,
            "language_model.model.layers.3.self_attn.q_b_proj.weight",
            "row 5, column 3",
        ] {
            assert!(error.contains(part), "{error}");
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left");
    }
}

#[test]
fn a_folder_that_cannot_be_written_to_is_an_error_with_a_way_out() {
    let (dir, folder) = (tiny(), tempfile::tempdir().unwrap());
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let error = failure(dir.path(), &int8(&file.join("below")));
    assert!(
        error.contains("cannot open") && error.contains("--trunk-folder"),
        "{error}"
    );
    let options = Options {
        trunk: Trunk::Int8 { folder: None },
        ..plain_options()
    };
    let error = failure(dir.path(), &options);
    assert!(
        error.contains("no folder for cached files") && error.contains("--trunk-folder"),
        "{error}"
    );
    assert!(matches!(
        opened(dir.path(), &options).err(),
        Some(Error::Trunk(TrunkError::NoFolder))
    ));
}

#[test]
fn several_at_once_make_one_file() {
    let (dir, folder) = (tiny(), tempfile::tempdir().unwrap());
    let options = int8(folder.path());
    let phases: Vec<Vec<LoadPhase>> = std::thread::scope(|scope| {
        let open = || scope.spawn(|| opened(dir.path(), &options).unwrap().2);
        let threads = [open(), open(), open(), open()];
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let made = phases
        .iter()
        .filter(|phases| phases.contains(&LoadPhase::Convert))
        .count();
    assert_eq!(made, 1, "{phases:?}");
    only(folder.path());
}

#[test]
fn a_stopped_conversion_leaves_nothing() {
    let (dir, folder) = (tiny(), tempfile::tempdir().unwrap());
    let options = int8(folder.path());
    let cancel: Cancel = options.cancel.clone();
    let stopped = Engine::open(Checkpoint::open(dir.path()).unwrap(), &options, &mut |at| {
        assert_eq!(at.phase, LoadPhase::Convert);
        if at.done > 0 {
            cancel.cancel();
        }
    });
    assert!(matches!(stopped.err(), Some(Error::Cancelled)));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

const CHILD: &str = "ANABRANCH_TEST_TRUNK";

/// Converts and says so; see below.
#[test]
fn converting_child() {
    let Ok(folder) = std::env::var(CHILD) else {
        return;
    };
    let model = Path::new(&folder).join("model");
    opened(&model, &int8(&Path::new(&folder).join("trunks"))).unwrap();
}

#[test]
fn a_killed_conversion_is_begun_again() {
    let dir = tempfile::tempdir().unwrap();
    let (model, folder) = (dir.path().join("model"), dir.path().join("trunks"));
    checkpoint::tiny::write_tiny(&model).unwrap();
    let whole = tempfile::tempdir().unwrap();
    opened(&model, &int8(whole.path())).unwrap();
    let sound = fs::read(only(whole.path())).unwrap();
    let mut unfinished = 0;
    for round in 0..12u64 {
        let _ = fs::remove_dir_all(&folder);
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["converting_child", "--exact"])
            .env(CHILD, dir.path())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        while !folder.exists() && child.try_wait().unwrap().is_none() {
            std::thread::sleep(Duration::from_micros(50));
        }
        // Anywhere in the conversion, which takes some milliseconds.
        std::thread::sleep(Duration::from_micros(round * 700));
        child.kill().unwrap();
        child.wait().unwrap();
        let names = || {
            fs::read_dir(&folder)
                .unwrap()
                .map(|e| e.unwrap().file_name().into_string().unwrap())
        };
        unfinished += names().filter(|name| name.ends_with(".partial")).count();
        for name in names().filter(|name| !name.ends_with(".partial")) {
            assert!(
                fs::read(folder.join(name)).unwrap() == sound,
                "round {round}: a name means a whole file"
            );
        }
        opened(&model, &int8(&folder)).unwrap();
        assert!(fs::read(only(&folder)).unwrap() == sound, "round {round}");
    }
    println!("{unfinished} of 12 kills hit an unfinished file");
}

/// The trained model shows what rounding does to a text.
#[test]
fn a_trained_model_says_the_same() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../demo/model");
    let folder = tempfile::tempdir().unwrap();
    let text = "The captain looked out over the grey water and said nothing for a long time. Then he turned to the \
                mate, who had been watching him, and asked how far it was to the shore.";
    let ids = checkpoint::tokenizer::Tokenizer::load(&dir)
        .unwrap()
        .encode_ordinary(text);
    let [exact, rounded] = [plain_options(), int8(folder.path())].map(|o| floats(logits(&dir, &o, &ids)));
    let far = largest_difference(&exact, &rounded);
    println!("largest difference of the demo model's logits {far:e}");
    assert!(far > 0.0 && far < 5.0, "{far}");
    assert_eq!(bits(exact).len(), bits(rounded).len());
}

/// A state belongs to the weights that made it.
#[test]
fn sessions_and_kept_states_of_two_trunks_do_not_mix() {
    let (dir, folder) = (tiny(), tempfile::tempdir().unwrap());
    let path = folder.path().join("s");
    let both = [plain_options(), int8(&folder.path().join("trunks"))];
    let mut engines = both.map(|options| opened(dir.path(), &options).unwrap().0);
    let mut stores = vec![];
    for (maker, version) in [(0, 1), (1, 2)] {
        let engine = &mut engines[maker];
        let want = fed(engine, &IDS, &[20]);
        let mut sequence = engine.new_sequence();
        common::pass(engine, &mut sequence, &IDS[..8]);
        engine.save(&sequence, &[], b"", &path).unwrap();
        // Where weights are as published, the file is as it was before there were others.
        let bytes = fs::read(&path).unwrap();
        assert_eq!((bytes[8], bytes[42]), (version, version - 1));
        let mut restored = engine.restore(Session::open(&path).unwrap()).unwrap();
        let vocab = engine.config().vocab_size;
        assert_same(
            &common::pass(engine, &mut restored, &IDS[8..]),
            &want[8 * vocab..],
            "restored",
        );
        let refused = engines[1 - maker]
            .restore(Session::open(&path).unwrap())
            .map(|_| ())
            .unwrap_err();
        let refused = refused.to_string();
        let (found, expected) = match maker {
            0 => ("a trunk of bf16", "expected int8, not weight-exact"),
            _ => ("a trunk of int8, not weight-exact", "expected bf16"),
        };
        for part in [path.to_str().unwrap(), found, expected, "--trunk"] {
            assert!(refused.contains(part), "{refused}");
        }
        let store = PrefixStore::open(folder.path(), &engines[maker], PrefixLimits::default()).unwrap();
        stores.push(store.folder().to_path_buf());
    }
    assert_ne!(stores[0], stores[1]);
}
