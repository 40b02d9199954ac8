//! A small synthetic checkpoint to be damaged.
#![allow(dead_code)] // each test file uses its part

use std::fs;
use std::path::{Path, PathBuf};

use checkpoint::{Error, synthesize};
use serde_json::{Map, Value};

pub const TINY: &str = include_str!("../../testdata/k3-tiny-config.json");

/// A fresh checkpoint: 13 layers, 14 shards, no vision.
pub struct Folder {
    dir: tempfile::TempDir,
}

impl Folder {
    pub fn new() -> Folder {
        let dir = tempfile::tempdir().unwrap();
        synthesize(TINY, 1, dir.path(), false, &mut |_| ()).unwrap();
        Folder { dir }
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Shard `number`, from 1.
    pub fn shard(&self, number: usize) -> PathBuf {
        self.path().join(format!("model-{number:05}-of-000014.safetensors"))
    }

    pub fn index(&self) -> PathBuf {
        self.path().join("model.safetensors.index.json")
    }

    /// Changes the index as JSON.
    pub fn edit_index(&self, edit: impl FnOnce(&mut Map<String, Value>)) {
        let mut json: Value = serde_json::from_slice(&fs::read(self.index()).unwrap()).unwrap();
        edit(json["weight_map"].as_object_mut().unwrap());
        fs::write(self.index(), json.to_string()).unwrap();
    }

    /// Changes the header of shard `number` as JSON and leaves the data alone.
    pub fn edit_header(&self, number: usize, edit: impl FnOnce(&mut Map<String, Value>)) {
        let (mut header, data) = self.split_shard(number);
        edit(&mut header);
        self.join_shard(number, &header, &data);
    }

    pub fn split_shard(&self, number: usize) -> (Map<String, Value>, Vec<u8>) {
        let bytes = fs::read(self.shard(number)).unwrap();
        let (length, rest) = bytes.split_first_chunk().unwrap();
        let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
        (serde_json::from_slice(header).unwrap(), data.to_vec())
    }

    pub fn join_shard(&self, number: usize, header: &Map<String, Value>, data: &[u8]) {
        let header = serde_json::to_vec(header).unwrap();
        let length = (header.len() as u64).to_le_bytes();
        fs::write(self.shard(number), [&length, header.as_slice(), data].concat()).unwrap();
    }

    /// Cuts shard `number` to `len` bytes.
    pub fn truncate(&self, number: usize, len: u64) {
        fs::OpenOptions::new()
            .write(true)
            .open(self.shard(number))
            .unwrap()
            .set_len(len)
            .unwrap();
    }
}

/// The message of an error, which must be one line.
pub fn message(error: &Error) -> String {
    let text = error.to_string();
    assert!(!text.contains('\n'), "{text}");
    text
}

/// A name of the text model in full.
pub fn full(name: &str) -> String {
    format!("language_model.{name}")
}
