//! State that lasts: branches, roll-back, files. The same bits as without; and nothing damaged is taken.

mod common;

use checkpoint::Checkpoint;
use common::{Golden, assert_same, fed, open, pass, plain_options, tiny};
use engine::{Cancel, Engine, Error, KvFormat, Options, Sequence, Session};
use kernels::ATTENTION_BLOCK;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Tokens of a text: one block of attention and a little of the next.
const TOKENS: usize = ATTENTION_BLOCK + 7;
/// Where the text is cut: in a page, before, at and after its end.
const CUTS: [usize; 6] = [1, 2, 60, ATTENTION_BLOCK - 1, ATTENTION_BLOCK, ATTENTION_BLOCK + 1];

fn formats() -> [Options; 2] {
    KvFormat::ALL.map(|kv| Options { kv, ..plain_options() })
}

fn text() -> Golden {
    Golden::read("k3_b")
}

/// The logits after each of `ids`, in passes of `size` tokens.
fn go_on(engine: &mut Engine, sequence: &mut Sequence, ids: &[u32], size: usize) -> Vec<u32> {
    ids.chunks(size).flat_map(|part| pass(engine, sequence, part)).collect()
}

/// What follows the first `cut` tokens in `all`.
fn after<'a>(all: &'a [u32], cut: usize, engine: &Engine) -> &'a [u32] {
    &all[cut * engine.config().vocab_size..]
}

#[test]
fn a_restored_sequence_goes_on_with_the_same_bits() {
    let golden = text();
    let ids = &golden.long_prompt[..TOKENS];
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    for options in formats() {
        let mut engine = open(&golden.dir, &options);
        let want = fed(&mut engine, ids, &[TOKENS]);
        for (cut, size) in CUTS.into_iter().zip([TOKENS, 1, 3, 50, 2, 64]) {
            let mut sequence = engine.new_sequence();
            go_on(&mut engine, &mut sequence, &ids[..cut], size);
            let bytes = engine.save(&sequence, &[9, 8], b"a note", &path).unwrap();
            assert_eq!(bytes, std::fs::metadata(&path).unwrap().len());
            assert_eq!(bytes, engine.session_bytes(&sequence, &[9, 8], b"a note").unwrap());
            // By another engine, as in another process.
            let mut other = open(&golden.dir, &options);
            let session = Session::open(&path).unwrap();
            assert_eq!((session.ids(), session.pending()), (&ids[..cut], &[9, 8][..]));
            assert_eq!(session.note(), b"a note");
            let mut restored = other.restore(session).unwrap();
            assert_eq!(restored.ids(), &ids[..cut]);
            let got = go_on(&mut other, &mut restored, &ids[cut..], size);
            assert_same(
                &got,
                after(&want, cut, &engine),
                &format!("restored after {cut}, {}", options.kv),
            );
            // Saving has not changed the one that was saved.
            let got = go_on(&mut engine, &mut sequence, &ids[cut..], TOKENS);
            assert_same(
                &got,
                after(&want, cut, &engine),
                &format!("saved after {cut}, {}", options.kv),
            );
        }
    }
}

#[test]
fn branches_and_roll_back() {
    let golden = text();
    let ids = &golden.long_prompt[..TOKENS];
    let aside: Vec<u32> = ids.iter().rev().copied().collect();
    for options in formats() {
        let mut engine = open(&golden.dir, &options);
        let want = fed(&mut engine, ids, &[TOKENS]);
        for (cut, size) in CUTS.into_iter().zip([7, TOKENS, 1, 2, 64, 5]) {
            let mut trunk = engine.new_sequence();
            go_on(&mut engine, &mut trunk, &ids[..cut], size);
            let mut branch = trunk.branch().unwrap();
            let moment = trunk.snapshot().unwrap();
            // The trunk goes elsewhere; branch and snapshot must not see it.
            go_on(&mut engine, &mut trunk, &aside[..TOKENS - cut], size);
            let got = go_on(&mut engine, &mut branch, &ids[cut..], size);
            assert_same(
                &got,
                after(&want, cut, &engine),
                &format!("branch after {cut}, {}", options.kv),
            );
            for _ in 0..2 {
                trunk.roll_back(&moment);
                assert_eq!(trunk.ids(), &ids[..cut]);
                let got = go_on(&mut engine, &mut trunk, &ids[cut..], size);
                assert_same(
                    &got,
                    after(&want, cut, &engine),
                    &format!("rolled back to {cut}, {}", options.kv),
                );
            }
        }
    }
}

#[test]
fn a_spoilt_sequence_is_not_kept_and_is_mended_by_roll_back() {
    let golden = text();
    let mut engine = open(&golden.dir, &plain_options());
    let want = fed(&mut engine, &golden.long_prompt[..12], &[12]);
    let mut sequence = engine.new_sequence();
    pass(&mut engine, &mut sequence, &golden.long_prompt[..10]);
    let moment = sequence.snapshot().unwrap();
    // Cancelled inside a pass: a probe asks for it after the first layer.
    let cancel = Cancel::default();
    let asked = cancel.clone();
    let mut probe = move |_: usize, _: &[f32], _: Option<&engine::Routes>| asked.cancel();
    let parts = &mut [engine::PassRows {
        sequence: &mut sequence,
        ids: &golden.long_prompt[10..12],
    }];
    let stopped = engine.pass(parts, &[], &cancel, Some(&mut probe));
    assert!(matches!(stopped, Err(Error::Cancelled)));
    assert!(sequence.is_spoilt());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    assert!(matches!(engine.save(&sequence, &[], &[], &path), Err(Error::Spoilt)));
    assert!(matches!(sequence.branch().map(|_| ()), Err(Error::Spoilt)));
    assert!(matches!(sequence.snapshot().map(|_| ()), Err(Error::Spoilt)));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    sequence.roll_back(&moment);
    let got = pass(&mut engine, &mut sequence, &golden.long_prompt[10..12]);
    assert_same(&got, after(&want, 10, &engine), "after roll-back");
}

/// The tiny model with narrow KDA heads: its session files are small.
fn narrow() -> tempfile::TempDir {
    let config = Path::new(env!("CARGO_MANIFEST_DIR")).join("../checkpoint/testdata/k3-tiny-config.json");
    let mut config: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(config).unwrap()).unwrap();
    config["text_config"]["linear_attn_config"]["head_dim"] = 8.into();
    config["text_config"]["linear_attn_config"]["num_heads"] = 2.into();
    let dir = tempfile::tempdir().unwrap();
    checkpoint::synthesize(&config.to_string(), 1, dir.path(), false, &mut |_| ()).unwrap();
    dir
}

/// A session of the narrow model: the folder, the engine, and the file's bytes.
fn saved(tokens: usize) -> (tempfile::TempDir, Engine, Vec<u8>) {
    let dir = narrow();
    let mut engine = open(dir.path(), &plain_options());
    let mut sequence = engine.new_sequence();
    let ids: Vec<u32> = (0..tokens as u32).map(|n| n * 7 % 512).collect();
    pass(&mut engine, &mut sequence, &ids);
    let path = dir.path().join("session");
    engine.save(&sequence, &[3], b"{}", &path).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    (dir, engine, bytes)
}

fn take(engine: &Engine, path: &Path) -> Result<Sequence, Error> {
    engine.restore(Session::open(path)?)
}

#[test]
fn a_file_with_any_byte_flipped_is_refused() {
    let (dir, engine, bytes) = saved(5);
    let path = dir.path().join("session");
    take(&engine, &path).unwrap();
    println!("{} bytes", bytes.len());
    for at in 0..bytes.len() {
        use std::os::unix::fs::FileExt;
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        file.write_all_at(&[bytes[at] ^ (1 << (at % 8))], at as u64).unwrap();
        let error = take(&engine, &path)
            .map(|_| ())
            .expect_err(&format!("byte {at}"))
            .to_string();
        assert!(error.contains(&path.display().to_string()), "{error}");
        assert!(error.contains("found") && error.contains("expected"), "{error}");
        file.write_all_at(&bytes[at..=at], at as u64).unwrap();
    }
    take(&engine, &path).unwrap();
}

#[test]
fn a_file_cut_short_or_too_long_is_refused() {
    let (dir, engine, bytes) = saved(5);
    let path = dir.path().join("session");
    for len in [0, 7, 8, 63, 64, 70, 84, 100, bytes.len() / 2, bytes.len() - 1] {
        std::fs::write(&path, &bytes[..len]).unwrap();
        let error = take(&engine, &path).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("expected"), "{len}: {error}");
    }
    std::fs::write(&path, [&bytes[..], &[0]].concat()).unwrap();
    assert!(
        take(&engine, &path)
            .map(|_| ())
            .unwrap_err()
            .to_string()
            .contains("damaged")
    );
}

#[test]
fn a_file_of_another_model_or_other_settings_is_refused() {
    let (dir, _engine, _) = saved(5);
    let path = dir.path().join("session");
    let refuse = |engine: &Engine, words: &str| {
        let error = take(engine, &path).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    };
    refuse(&open(&text().dir, &plain_options()), "a model whose config.json");
    let with = |options: Options| open(dir.path(), &options);
    refuse(
        &with(Options {
            kv: KvFormat::Bf16,
            ..plain_options()
        }),
        "found latents in f32, expected bf16",
    );
    refuse(
        &with(Options {
            mla_eps: 2e-6,
            ..plain_options()
        }),
        "an MLA epsilon of 1e-6, expected 2e-6",
    );
    let short = Options {
        positions: 4,
        ..plain_options()
    };
    refuse(&with(short), "a sequence of 5 tokens does not fit the 4 positions");
    // The same shapes, other weights.
    let shard = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().path());
    let shard = shard
        .into_iter()
        .find(|p| p.extension().is_some_and(|e| e == "safetensors"))
        .unwrap();
    let mut weights = std::fs::read(&shard).unwrap();
    let last = weights.len() - 2;
    weights[last] ^= 1;
    std::fs::write(&shard, weights).unwrap();
    refuse(&with(plain_options()), "a model whose weights have checksum");
    let fine = Checkpoint::open(dir.path());
    assert!(fine.is_ok(), "the changed model is a model");
}

#[test]
fn a_file_of_another_version_is_refused() {
    let (dir, engine, bytes) = saved(5);
    let path = dir.path().join("session");
    for (at, version, words) in [
        (8, 3, "format version 3, expected 2"),
        (12, 2, "arithmetic (numerics) version 2"),
        (42, 2, "trunk format 2"),
    ] {
        let mut other = bytes.clone();
        other[at] = version;
        let sum = crc32c::crc32c(&other[..60]);
        other[60..64].copy_from_slice(&sum.to_le_bytes());
        std::fs::write(&path, other).unwrap();
        let error = take(&engine, &path).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
}

/// A header may promise anything: what it says is compared with the file before memory is taken for it.
#[test]
fn a_promise_beyond_the_file_takes_no_memory() {
    let (dir, engine, bytes) = saved(5);
    let path = dir.path().join("session");
    for tokens in [6, 1 << 40, u64::MAX] {
        let mut other = bytes.clone();
        other[48..56].copy_from_slice(&u64::to_le_bytes(tokens));
        let sum = crc32c::crc32c(&other[..60]);
        other[60..64].copy_from_slice(&sum.to_le_bytes());
        std::fs::write(&path, other).unwrap();
        let error = take(&engine, &path).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("damaged"), "{error}");
    }
}

const CHILD: &str = "ANABRANCH_SAVING_CHILD";
const LENGTHS: [usize; 2] = [40, 9];

/// Not a test by itself: the process that the next one kills.
#[test]
fn saving_child() {
    let Some(dir) = std::env::var_os(CHILD) else { return };
    let dir = Path::new(&dir);
    let mut engine = open(dir, &plain_options());
    let sequences = LENGTHS.map(|tokens| {
        let mut sequence = engine.new_sequence();
        let ids: Vec<u32> = (0..tokens as u32).collect();
        pass(&mut engine, &mut sequence, &ids);
        sequence
    });
    loop {
        for sequence in &sequences {
            engine.save(sequence, &[], &[], &dir.join("session")).unwrap();
        }
    }
}

#[test]
fn killed_while_saving_the_file_is_whole() {
    let dir = tiny();
    let path = dir.path().join("session");
    let mut engine = open(dir.path(), &plain_options());
    let next = [5, 6];
    let want = LENGTHS.map(|tokens| {
        let ids: Vec<u32> = (0..tokens as u32).chain(next).collect();
        after(&fed(&mut engine, &ids, &[ids.len()]), tokens, &engine).to_vec()
    });
    let mut unfinished = 0;
    for round in 0..20u64 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["saving_child", "--exact"])
            .env(CHILD, dir.path())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        while !path.exists() {
            std::thread::sleep(Duration::from_millis(1));
        }
        // Anywhere in a save, of which there are hundreds a second.
        std::thread::sleep(Duration::from_micros(300 + round * 1709 % 9000));
        child.kill().unwrap();
        child.wait().unwrap();
        unfinished += u32::from(path.with_extension("partial").exists());
        let mut sequence = take(&engine, &path).unwrap();
        let which = LENGTHS.iter().position(|len| *len == sequence.ids().len()).unwrap();
        let got = pass(&mut engine, &mut sequence, &next);
        assert_same(&got, &want[which], &format!("round {round}"));
    }
    println!("{unfinished} of 20 kills hit an unfinished file");
    // What was left behind is in nobody's way.
    let sequence = take(&engine, &path).unwrap();
    engine.save(&sequence, &[], &[], &path).unwrap();
    assert!(!path.with_extension("partial").exists());
}

#[test]
fn two_writers_of_one_file() {
    let (dir, engine, _) = saved(3);
    let path = dir.path().join("session");
    let sequence = take(&engine, &path).unwrap();
    let partial = std::fs::File::create(path.with_extension("partial")).unwrap();
    partial.lock().unwrap();
    let error = engine.save(&sequence, &[], &[], &path).unwrap_err().to_string();
    assert!(error.contains("being written by another process"), "{error}");
    partial.unlock().unwrap();
    engine.save(&sequence, &[], &[], &path).unwrap();
}
