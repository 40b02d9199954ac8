//! Each way in which a folder can be wrong, and the one line that says so.

mod common;

use std::fs;
use std::path::Path;

use checkpoint::{Checkpoint, Error, HeaderFault, survey};
use common::{Folder, full, message};
use serde_json::json;

const ROUTER: &str = "model.layers.1.block_sparse_moe.gate.weight";

/// The one error that opening gives.
fn refusal(folder: &Folder) -> Error {
    let error = Checkpoint::open(folder.path()).unwrap_err();
    message(&error);
    error
}

fn len(path: &Path) -> u64 {
    fs::metadata(path).unwrap().len()
}

#[test]
fn a_missing_shard_is_named_with_what_is_to_come() {
    let folder = Folder::new();
    let tensor_bytes = folder.split_shard(3).1.len() as u64;
    fs::remove_file(folder.shard(3)).unwrap();
    let error = refusal(&folder);
    assert!(
        matches!(&error, Error::MissingShard { path, named_by: "the index" } if *path == folder.shard(3)),
        "{error}"
    );

    let survey = survey(folder.path()).unwrap();
    assert_eq!(survey.problem_count, 1);
    assert_eq!(survey.bytes_to_come, tensor_bytes);
    assert_eq!(survey.shards_complete(), 13);
    assert_eq!(
        (survey.shards[2].found, survey.shards[2].tensor_bytes),
        (None, Some(tensor_bytes))
    );
    assert_eq!((survey.experts_found, survey.experts_contiguous), (88, 88));
}

#[test]
fn an_incomplete_download_is_reported_whole() {
    let folder = Folder::new();
    let whole = [4, 5, 6].map(|number| len(&folder.shard(number)));
    let header_bytes = whole[2] - folder.split_shard(6).1.len() as u64;
    fs::remove_file(folder.shard(2)).unwrap();
    let missing = survey(folder.path()).unwrap().bytes_to_come;
    folder.truncate(4, whole[0] - 1000);
    folder.truncate(5, 0);
    folder.truncate(6, 100);
    let survey = survey(folder.path()).unwrap();

    assert_eq!(survey.problem_count, 4, "{:?}", survey.problems);
    let texts: Vec<String> = survey.problems.iter().map(message).collect();
    assert!(
        texts[0].contains("model-00002-of-000014.safetensors: found no such file"),
        "{}",
        texts[0]
    );
    let cut = format!("found {} bytes, expected {}", whole[0] - 1000, whole[0]);
    assert!(texts[1].contains(&cut), "{}", texts[1]);
    assert!(texts[2].contains("found 0 bytes, expected 8"), "{}", texts[2]);
    assert!(
        texts[3].contains(&format!("found 100 bytes, expected {header_bytes}")),
        "{}",
        texts[3]
    );
    let without_header = |whole: u64| whole - header_bytes;
    let to_come = missing + 1000 + without_header(whole[1]) + without_header(whole[2]) - 100;
    assert_eq!(survey.bytes_to_come, to_come);

    let text = message(&Checkpoint::open(folder.path()).unwrap_err());
    assert!(
        text.contains(&texts[0]) && text.ends_with("(and 3 more: `anabranch inspect` lists them)"),
        "{text}"
    );
}

#[test]
fn a_header_longer_than_its_file_is_refused() {
    let folder = Folder::new();
    let mut bytes = fs::read(folder.shard(1)).unwrap();
    let file_len = bytes.len() as u64;
    bytes[..8].copy_from_slice(&(file_len - 7).to_le_bytes());
    fs::write(folder.shard(1), &bytes).unwrap();
    let error = refusal(&folder);
    assert!(
        matches!(error, Error::ShortShard { found, expected, .. } if found == file_len && expected == file_len + 1),
        "{error}"
    );

    bytes[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    fs::write(folder.shard(1), &bytes).unwrap();
    let error = refusal(&folder);
    assert!(matches!(error, Error::HeaderLength { found: u64::MAX, .. }), "{error}");
}

#[test]
fn bytes_behind_the_data_are_refused() {
    let folder = Folder::new();
    let whole = len(&folder.shard(1));
    folder.truncate(1, whole + 1);
    let error = refusal(&folder);
    assert!(
        matches!(error, Error::LongShard { found, expected, .. } if found == whole + 1 && expected == whole),
        "{error}"
    );
}

#[test]
fn wrong_dtype_and_wrong_shape_name_the_tensor() {
    let folder = Folder::new();
    folder.edit_header(2, |header| header[&full(ROUTER)]["dtype"] = json!("F16"));
    let text = message(&refusal(&folder));
    assert!(
        text.contains(&format!("{}: found dtype F16, expected BF16", full(ROUTER))),
        "{text}"
    );

    let folder = Folder::new();
    folder.edit_header(2, |header| header[&full(ROUTER)]["shape"] = json!([128, 8]));
    let text = message(&refusal(&folder));
    assert!(
        text.contains(&format!("{}: found shape [128, 8], expected [8, 128]", full(ROUTER))),
        "{text}"
    );

    let folder = Folder::new();
    let expert = full("model.layers.1.block_sparse_moe.experts.7.w2.weight_scale");
    folder.edit_header(2, |header| header[&expert]["dtype"] = json!("F8_E8M0"));
    let text = message(&refusal(&folder));
    assert!(
        text.contains(&format!("{expert}: found dtype F8_E8M0, expected U8")),
        "{text}"
    );
}

#[test]
fn offsets_that_overlap_or_leave_the_file_are_refused() {
    for (change, fault) in [
        (-2, HeaderFault::Overlap),
        (2, HeaderFault::Gap),
        (1i64 << 40, HeaderFault::Gap),
    ] {
        let folder = Folder::new();
        folder.edit_header(2, |header| {
            let offsets = header[&full(ROUTER)]["data_offsets"].as_array_mut().unwrap();
            for offset in offsets {
                *offset = json!(offset.as_i64().unwrap() + change);
            }
        });
        let error = refusal(&folder);
        assert!(
            matches!(error, Error::HeaderEntry { fault: found, .. } if found == fault),
            "{error}"
        );
    }
    // A consistent header over too short a file.
    let folder = Folder::new();
    folder.edit_header(2, |header| {
        let end = header
            .values()
            .map(|entry| entry["data_offsets"][1].as_u64().unwrap())
            .max()
            .unwrap();
        header.insert(
            "vision_tower.far".into(),
            json!({"dtype": "U8", "shape": [1u64 << 40], "data_offsets": [end, end + (1 << 40)]}),
        );
    });
    let error = refusal(&folder);
    assert!(
        matches!(error, Error::ShortShard { found, expected, .. } if expected == found + (1 << 40)),
        "{error}"
    );
}

#[test]
fn a_header_that_is_not_json_is_refused() {
    let folder = Folder::new();
    let mut bytes = fs::read(folder.shard(9)).unwrap();
    bytes[8] = b'[';
    fs::write(folder.shard(9), bytes).unwrap();
    let error = refusal(&folder);
    assert!(
        matches!(&error, Error::HeaderJson { path, .. } if *path == folder.shard(9)),
        "{error}"
    );
}

/// A folder where a file should be cannot be read by any user, root included.
#[test]
fn an_unreadable_file_is_named() {
    for name in [
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
        "model-00007-of-000014.safetensors",
    ] {
        let folder = Folder::new();
        let path = folder.path().join(name);
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        let error = refusal(&folder);
        assert!(message(&error).contains(&path.display().to_string()), "{error}");
        assert!(message(&error).contains("cannot read"), "{error}");
    }
}

#[test]
fn experts_without_mxfp4_are_refused_once() {
    let folder = Folder::new();
    folder.edit_header(2, |header| {
        for name in header
            .keys()
            .filter(|name| name.ends_with(".weight_packed"))
            .cloned()
            .collect::<Vec<_>>()
        {
            let entry = header.remove(&name).unwrap();
            header.insert(name.replace("weight_packed", "weight"), entry);
        }
    });
    let survey = survey(folder.path()).unwrap();
    assert_eq!(survey.problem_count, 1, "{:?}", survey.problems);
    let text = message(&survey.problems[0]);
    assert!(
        text.contains(".weight: found a routed expert stored as plain weights, expected MXFP4"),
        "{text}"
    );
}

#[test]
fn tensors_of_another_architecture_are_refused() {
    let folder = Folder::new();
    let bias = full("model.layers.0.self_attn.q_proj.bias");
    folder.edit_header(1, |header| {
        let entry = header.remove(&full("model.layers.0.self_attn.dt_bias")).unwrap();
        header.insert(bias.clone(), entry);
    });
    let survey = survey(folder.path()).unwrap();
    let texts: Vec<String> = survey.problems.iter().map(message).collect();
    assert!(
        texts[0].contains(&format!("found tensor {bias}, expected only tensors of Kimi K3")),
        "{texts:?}"
    );
    assert!(
        texts[1].contains("found no tensor language_model.model.layers.0.self_attn.dt_bias"),
        "{texts:?}"
    );
    assert_eq!(texts.len(), 2);
}

#[test]
fn index_and_headers_must_agree() {
    let folder = Folder::new();
    folder.edit_index(|map| drop(map.remove(&full(ROUTER))));
    let text = message(&refusal(&folder));
    assert!(
        text.contains(&format!(
            "found tensor {}, expected it in no shard as the index says",
            full(ROUTER)
        )),
        "{text}"
    );

    let folder = Folder::new();
    folder.edit_index(|map| drop(map.insert(full(ROUTER), json!("model-00005-of-000014.safetensors"))));
    let text = message(&refusal(&folder));
    assert!(
        text.contains("model-00002-of-000014.safetensors: found tensor"),
        "{text}"
    );
    assert!(
        text.contains("expected it in model-00005-of-000014.safetensors as the index says"),
        "{text}"
    );

    let folder = Folder::new();
    folder.edit_header(2, |header| {
        let name = full(ROUTER);
        let entry = header.remove(&name).unwrap();
        header.insert("vision_tower.instead".into(), entry);
    });
    let error = refusal(&folder);
    assert!(
        matches!(&error, Error::MissingTensor { path, .. } if *path == folder.shard(2)),
        "{error}"
    );
}

#[test]
fn one_tensor_in_two_shards_is_refused() {
    let folder = Folder::new();
    fs::remove_file(folder.index()).unwrap();
    fs::copy(folder.shard(14), folder.path().join("zz.safetensors")).unwrap();
    let text = message(&refusal(&folder));
    assert!(
        text.contains("zz.safetensors: found tensor language_model.lm_head.weight a second time"),
        "{text}"
    );
    assert!(text.contains("only in model-00014-of-000014.safetensors"), "{text}");
}

#[test]
fn a_folder_without_index_opens_by_its_files() {
    let folder = Folder::new();
    fs::remove_file(folder.index()).unwrap();
    assert_eq!(Checkpoint::open(folder.path()).unwrap().shards().len(), 14);

    let tensor_bytes = folder.split_shard(6).1.len() as u64;
    fs::remove_file(folder.shard(6)).unwrap();
    let error = refusal(&folder);
    assert!(
        matches!(&error, Error::MissingShard { path, named_by } if *path == folder.shard(6) && named_by.contains("numbering")),
        "{error}"
    );
    assert_eq!(survey(folder.path()).unwrap().bytes_to_come, tensor_bytes);
}

#[test]
fn without_a_config_the_shards_are_still_surveyed() {
    let folder = Folder::new();
    fs::remove_file(folder.path().join("config.json")).unwrap();
    folder.truncate(14, 1000);
    let whole = survey(folder.path()).unwrap();
    assert_eq!(whole.problem_count, 2, "{:?}", whole.problems);
    assert!(whole.config.is_none() && whole.sizes.is_none());
    assert!(message(&whole.problems[0]).contains("config.json: cannot read"));
    assert_eq!(whole.shards_complete(), 13);
    assert!(whole.tensors() > 800);

    fs::remove_file(folder.shard(1)).unwrap();
    let tensor_bytes = whole.shards[0].tensor_bytes.unwrap();
    assert_eq!(
        survey(folder.path()).unwrap().bytes_to_come,
        whole.bytes_to_come + tensor_bytes
    );
}

#[test]
fn a_folder_of_something_else_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("notes.txt"), "hello").unwrap();
    let error = Checkpoint::open(dir.path()).unwrap_err();
    assert!(matches!(error, Error::NotACheckpoint { .. }), "{error}");
    message(&error);
    let error = Checkpoint::open(&dir.path().join("nowhere")).unwrap_err();
    assert!(message(&error).contains("nowhere: cannot open"), "{error}");
}

/// Shards that only a vision model needs may be absent.
#[test]
fn a_text_model_opens_without_vision_shards() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/golden/k3_a");
    let dir = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(golden).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if !name.ends_with("12-of-000012.safetensors") {
            fs::copy(&path, dir.path().join(name)).unwrap();
        }
    }
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(checkpoint.shards().len(), 12);
    let survey = survey(dir.path()).unwrap();
    assert_eq!(
        (survey.problem_count, survey.bytes_to_come, survey.shards_complete()),
        (0, 0, 11)
    );
    assert!(!survey.shards[11].needed && survey.shards[10].found.is_some());
}
