//! Synthetic checkpoints: deterministic, in the published order, with weights in range, and never over something else.

mod common;

use std::fs;
use std::path::Path;

use checkpoint::{Checkpoint, Error, synthesize};
use common::{TINY, message};

fn write(seed: u64, sparse: bool) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    synthesize(TINY, seed, &dir.path().join("new"), sparse, &mut |_| ()).unwrap();
    dir
}

/// Every file with its bytes, by name.
fn files(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let mut files: Vec<_> = fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap())
        .map(|entry| {
            (
                entry.file_name().into_string().unwrap(),
                fs::read(entry.path()).unwrap(),
            )
        })
        .collect();
    files.sort();
    files
}

#[test]
fn a_seed_gives_the_same_files_and_another_seed_others() {
    let (first, again, other) = (write(7, false), write(7, false), write(8, false));
    let first = files(&first.path().join("new"));
    assert_eq!(first.len(), 14 + 5);
    assert!(first == files(&again.path().join("new")));
    let other = files(&other.path().join("new"));
    for ((name, bytes), (_, others)) in first.iter().zip(&other) {
        assert_eq!(bytes != others, name.starts_with("model-"), "{name}");
    }
    assert!(!first.iter().any(|(name, _)| name.ends_with(".partial")));
}

#[test]
fn the_folder_opens_and_holds_the_callers_config() {
    let dir = write(7, false);
    let out = dir.path().join("new");
    assert_eq!(fs::read_to_string(out.join("config.json")).unwrap(), TINY);
    let checkpoint = Checkpoint::open(&out).unwrap();
    assert_eq!(checkpoint.stop_ids(), [257, 502]);
    assert_eq!(checkpoint.max_extents(), 1);
    let ranks = fs::read_to_string(out.join("tiktoken.model")).unwrap();
    assert_eq!(ranks.lines().count(), 256);
    assert!(
        ranks.starts_with("AA== 0\nAQ== 1\n") && ranks.ends_with("/w== 255\n"),
        "{ranks}"
    );
}

#[test]
fn holes_have_the_same_headers_and_lengths() {
    let (full, sparse) = (write(7, false), write(7, true));
    let (full, sparse) = (files(&full.path().join("new")), files(&sparse.path().join("new")));
    for ((name, full), (_, sparse)) in full.iter().zip(&sparse) {
        assert_eq!(full.len(), sparse.len(), "{name}");
        if name.starts_with("model-") {
            let header = 8 + u64::from_le_bytes(full[..8].try_into().unwrap()) as usize;
            assert_eq!(full[..header], sparse[..header], "{name}");
            assert!(sparse[header..].iter().all(|&byte| byte == 0), "{name}");
        } else {
            assert_eq!(full, sparse, "{name}");
        }
    }
}

/// No infinities, no NaN, the scale bytes that were meant, and zeros behind A_log's heads.
#[test]
fn weights_are_finite_and_in_range() {
    let dir = write(7, false);
    let checkpoint = Checkpoint::open(&dir.path().join("new")).unwrap();
    let shards: Vec<Vec<u8>> = checkpoint
        .shards()
        .iter()
        .map(|shard| fs::read(&shard.path).unwrap())
        .collect();
    let bytes = |name: &str| {
        let info = checkpoint.tensor(name).unwrap();
        &shards[info.shard][info.offset as usize..][..info.len as usize]
    };
    for spec in checkpoint.schema().trunk() {
        let bytes = bytes(&spec.name);
        let values: Vec<f32> = match spec.dtype {
            checkpoint::Dtype::F32 => bytes
                .as_chunks()
                .0
                .iter()
                .map(|&word| f32::from_le_bytes(word))
                .collect(),
            _ => bytes
                .as_chunks()
                .0
                .iter()
                .map(|&[a, b]| f32::from_le_bytes([0, 0, a, b]))
                .collect(),
        };
        assert!(values.iter().all(|value| value.abs() < 8.0), "{}", spec.name);
        assert!(values.iter().any(|value| value != &values[0]), "{}", spec.name);
        if spec.name.ends_with("A_log") {
            assert!(values[..6].iter().all(|&value| value != 0.0) && values[6..].iter().all(|&value| value == 0.0));
        }
    }
    let place = checkpoint.expert(12, 7).unwrap();
    let extent = place.extents()[0];
    let scale = place.part(checkpoint::ExpertPart::W2Scale);
    let scales = &shards[extent.shard][(extent.offset + scale.offset) as usize..][..scale.len as usize];
    let (low, high) = (scales.iter().min().unwrap(), scales.iter().max().unwrap());
    assert!(high - low == 2 && *low > 110 && *high < 127, "{low}..{high}");
}

#[test]
fn a_folder_with_something_in_it_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("thesis.tex"), "x").unwrap();
    let error = synthesize(TINY, 1, dir.path(), true, &mut |_| ()).unwrap_err();
    assert!(
        matches!(&error, Error::TargetNotEmpty { found, .. } if found == "thesis.tex"),
        "{error}"
    );
    message(&error);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);

    let file = dir.path().join("thesis.tex");
    let error = synthesize(TINY, 1, &file, true, &mut |_| ()).unwrap_err();
    assert!(
        message(&error).contains("thesis.tex: cannot create the folder"),
        "{error}"
    );
}

/// A model of 10^15 bytes fits no disk that runs tests.
#[test]
fn too_little_space_is_refused_before_anything_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let mut json: serde_json::Value = serde_json::from_str(TINY).unwrap();
    for name in ["routed_expert_hidden_size", "moe_intermediate_size"] {
        json["text_config"][name] = (1 << 23).into();
    }
    let error = synthesize(&json.to_string(), 1, dir.path(), false, &mut |_| ()).unwrap_err();
    assert!(
        matches!(error, Error::NoSpace { needed, free, .. } if needed > 1_000_000_000_000_000 && free < needed),
        "{error}"
    );
    message(&error);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn a_contradictory_config_is_refused_before_anything_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("new");
    let config = TINY.replace("\"num_experts\": 8", "\"num_experts\": 2");
    let error = synthesize(&config, 1, &out, false, &mut |_| ()).unwrap_err();
    assert!(
        message(&error).contains("text_config.num_experts_per_token: found 3"),
        "{error}"
    );
    assert!(!out.exists());
}
