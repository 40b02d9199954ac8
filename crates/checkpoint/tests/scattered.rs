//! Experts whose six tensors are not side by side are found all the same.

mod common;

use std::fs;
use std::os::unix::fs::FileExt;

use checkpoint::{Checkpoint, ExpertPart};
use common::{Folder, full};
use serde_json::json;

/// The bytes of one part of an expert, through its place.
fn part_bytes(checkpoint: &Checkpoint, layer: usize, expert: usize, part: ExpertPart) -> Vec<u8> {
    let place = checkpoint.expert(layer, expert).unwrap();
    let part = place.part(part);
    let extent = place.extents()[part.extent];
    let file = fs::File::open(&checkpoint.shards()[extent.shard].path).unwrap();
    let mut bytes = vec![0; part.len as usize];
    file.read_exact_at(&mut bytes, extent.offset + part.offset).unwrap();
    bytes
}

/// Layer 1's shard gets its scales behind everything else, as a writer that orders by kind would have it.
#[test]
fn parts_are_found_wherever_they_lie() {
    let folder = Folder::new();
    let published = Checkpoint::open(folder.path()).unwrap();
    let (mut header, data) = folder.split_shard(2);
    let mut names: Vec<String> = header.keys().cloned().collect();
    names.sort_by_key(|name| (name.ends_with("weight_scale"), header[name]["data_offsets"][0].as_u64()));
    let mut moved = Vec::new();
    for name in &names {
        let offsets = &mut header[name]["data_offsets"];
        let (begin, end) = (
            offsets[0].as_u64().unwrap() as usize,
            offsets[1].as_u64().unwrap() as usize,
        );
        *offsets = json!([moved.len(), moved.len() + end - begin]);
        moved.extend_from_slice(&data[begin..end]);
    }
    let bytes_before: Vec<Vec<u8>> = (0..8)
        .flat_map(|expert| ExpertPart::ALL.map(|part| part_bytes(&published, 1, expert, part)))
        .collect();
    folder.join_shard(2, &header, &moved);

    let scattered = Checkpoint::open(folder.path()).unwrap();
    assert_eq!((published.max_extents(), scattered.max_extents()), (1, 2));
    assert_eq!(scattered.expert(1, 3).unwrap().extents().len(), 2);
    assert_eq!(scattered.expert(1, 3).unwrap().bytes(), scattered.max_expert_bytes());
    assert_eq!(scattered.expert(2, 3).unwrap().extents().len(), 1);
    let bytes_after: Vec<Vec<u8>> = (0..8)
        .flat_map(|expert| ExpertPart::ALL.map(|part| part_bytes(&scattered, 1, expert, part)))
        .collect();
    assert!(bytes_before == bytes_after);
    let survey = checkpoint::survey(folder.path()).unwrap();
    assert_eq!((survey.experts_found, survey.experts_contiguous), (96, 88));
}

/// An expert may even be spread over shards.
#[test]
fn an_expert_in_two_shards_has_an_extent_in_each() {
    let folder = Folder::new();
    let name = full("model.layers.1.block_sparse_moe.experts.0.w1.weight_packed");
    let (mut from, mut from_data) = folder.split_shard(2);
    let entry = from.remove(&name).unwrap();
    let (begin, end) = (
        entry["data_offsets"][0].as_u64().unwrap(),
        entry["data_offsets"][1].as_u64().unwrap(),
    );
    let bytes: Vec<u8> = from_data.drain(begin as usize..end as usize).collect();
    for entry in from.values_mut() {
        for offset in entry["data_offsets"].as_array_mut().unwrap() {
            let at = offset.as_u64().unwrap();
            *offset = json!(if at >= end { at - (end - begin) } else { at });
        }
    }
    let (mut to, mut to_data) = folder.split_shard(14);
    let at = to_data.len() as u64;
    to.insert(
        name.clone(),
        json!({"dtype": "U8", "shape": entry["shape"], "data_offsets": [at, at + end - begin]}),
    );
    to_data.extend(&bytes);
    folder.join_shard(2, &from, &from_data);
    folder.join_shard(14, &to, &to_data);
    folder.edit_index(|map| drop(map.insert(name, json!("model-00014-of-000014.safetensors"))));

    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let place = checkpoint.expert(1, 0).unwrap();
    let shards: Vec<usize> = place.extents().iter().map(|extent| extent.shard).collect();
    assert_eq!(shards, [1, 13]);
    assert_eq!(part_bytes(&checkpoint, 1, 0, ExpertPart::W1Packed), bytes);
}
