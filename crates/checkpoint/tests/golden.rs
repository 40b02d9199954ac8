//! Two small checkpoints in the release's layout open, and everything in them is where the files say.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use checkpoint::{Checkpoint, Class, Dtype, Error, ExpertPart, Schema, survey};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../testdata/golden")
        .join(name)
}

#[test]
fn both_open_with_their_published_sizes() {
    for (name, shards, tensors, total_size, expert_bytes, stops) in [
        ("k3_a", 12, 822, 2_162_176, 3264, [289, 290]),
        ("k3_b", 17, 1_940, 2_237_744, 3264, [385, 386]),
    ] {
        let checkpoint = Checkpoint::open(&golden(name)).unwrap();
        assert_eq!(checkpoint.shards().len(), shards, "{name}");
        assert_eq!(checkpoint.max_expert_bytes(), expert_bytes, "{name}");
        assert_eq!(checkpoint.max_extents(), 1, "{name}");
        assert_eq!(checkpoint.stop_ids(), stops, "{name}");

        let survey = survey(&golden(name)).unwrap();
        assert_eq!(
            (survey.problem_count, survey.bytes_to_come),
            (0, 0),
            "{name}: {:?}",
            survey.problems
        );
        assert_eq!(survey.tensors(), tensors, "{name}");
        assert_eq!(survey.shards_complete(), shards, "{name}");
        let sizes = survey.sizes.unwrap();
        assert_eq!(
            sizes.trunk() + sizes.experts + survey.vision_bytes,
            total_size,
            "{name}"
        );
        assert_eq!(survey.experts_contiguous, checkpoint.schema().expert_count(), "{name}");
        assert_eq!(survey.experts_found, survey.experts_contiguous, "{name}");
    }
}

#[test]
fn an_expert_is_one_extent_that_its_parts_fill() {
    let checkpoint = Checkpoint::open(&golden("k3_b")).unwrap();
    let config = checkpoint.config().clone();
    for layer in (0..config.num_hidden_layers).filter(|&layer| config.is_moe(layer)) {
        for expert in 0..config.num_experts {
            let place = checkpoint.expert(layer, expert).unwrap();
            let [extent] = place.extents() else { panic!("{place:?}") };
            assert_eq!(extent.len, checkpoint.max_expert_bytes());
            assert_eq!(extent.shard, layer);
            assert!(extent.offset + extent.len <= checkpoint.shards()[layer].len);
            let mut at = 0;
            for part in ExpertPart::ALL {
                let part_place = place.part(part);
                assert_eq!((part_place.extent, part_place.offset), (0, at));
                assert_eq!(part_place.len, checkpoint.schema().expert_part_bytes(part));
                at += part_place.len;
            }
        }
    }
}

/// The bytes at a tensor's place are the tensor: norms lie around 1, and A_log ends in zeros.
#[test]
fn places_point_at_the_tensors() {
    let checkpoint = Checkpoint::open(&golden("k3_a")).unwrap();
    let read = |name: &str| {
        let info = *checkpoint.tensor(name).unwrap();
        let file = std::fs::File::open(&checkpoint.shards()[info.shard].path).unwrap();
        let mut bytes = vec![0; info.len as usize];
        file.read_exact_at(&mut bytes, info.offset).unwrap();
        (info, bytes)
    };
    let (info, bytes) = read("model.layers.4.input_layernorm.weight");
    assert_eq!((info.dtype, info.shape.dims()), (Dtype::Bf16, &[96][..]));
    let (words, _) = bytes.as_chunks::<2>();
    let value = |word: &[u8; 2]| f32::from_bits(u32::from(u16::from_le_bytes(*word)) << 16);
    let mean = words.iter().map(value).sum::<f32>() / 96.0;
    assert!((mean - 1.0).abs() < 0.1, "{mean}");

    let (info, bytes) = read("model.layers.0.self_attn.A_log");
    assert_eq!((info.dtype, info.shape.dims()), (Dtype::F32, &[32][..]));
    assert!(bytes[..12].iter().any(|&byte| byte != 0) && bytes[12..].iter().all(|&byte| byte == 0));
}

#[test]
fn what_is_not_there_is_refused_with_what_is() {
    let checkpoint = Checkpoint::open(&golden("k3_a")).unwrap();
    let text = checkpoint
        .tensor("model.layers.9.input_layernorm.weight")
        .unwrap_err()
        .to_string();
    assert!(
        text.contains("found no tensor model.layers.9.input_layernorm.weight"),
        "{text}"
    );
    for (layer, expert) in [(0, 0), (1, 12), (9, 0), (usize::MAX, usize::MAX)] {
        let error = checkpoint.expert(layer, expert).unwrap_err();
        assert!(
            matches!(
                error,
                Error::NoSuchExpert {
                    first_layer: 1,
                    layers: 9,
                    experts: 12,
                    ..
                }
            ),
            "{error}"
        );
    }
}

#[test]
fn size_classes_add_up_to_the_trunk() {
    let checkpoint = Checkpoint::open(&golden("k3_a")).unwrap();
    let sizes = checkpoint.sizes();
    let stored: u64 = checkpoint
        .schema()
        .trunk()
        .iter()
        .map(|spec| checkpoint.tensor(&spec.name).unwrap().len)
        .sum();
    assert_eq!(sizes.trunk(), stored);
    assert_eq!(sizes.of(Class::Embedding), 544 * 96 * 2);
    assert_eq!(sizes.trunk_without_embedding(), stored - 544 * 96 * 2);
    assert_eq!(sizes.experts_of_a_layer, 12 * sizes.one_expert);
    assert_eq!(Schema::new(checkpoint.config()).sizes(), sizes);
}
