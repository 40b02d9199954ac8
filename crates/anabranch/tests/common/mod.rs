//! The program from outside, and folders to run it on.
#![allow(dead_code)] // each test file uses its part

pub mod jobs;

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::{Map, Value};

pub const TINY: &str = include_str!("../../../checkpoint/testdata/k3-tiny-config.json");

/// The program, with its own folder of cached files so that no test touches the user's.
pub fn anabranch<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_anabranch"));
    command.args(args).stdin(Stdio::null());
    command.env("XDG_CACHE_HOME", Path::new(env!("CARGO_TARGET_TMPDIR")).join("cache"));
    command
}

pub fn run<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Output {
    anabranch(args).output().unwrap()
}

pub fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// The JSON of a run that ended well.
pub fn json(output: &Output) -> Value {
    assert!(output.status.success(), "{}", stderr(output));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// The one line of an error, with status 1.
pub fn error_line(output: &Output) -> String {
    let text = stderr(output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with("note: ")).collect();
    let [line] = lines[..] else {
        panic!("found {} lines, expected one:\n{text}", lines.len())
    };
    assert!(line.starts_with("error: "), "{line}");
    line.to_owned()
}

/// A checkpoint with known answers.
pub struct Golden {
    pub dir: PathBuf,
    pub prompt: Vec<u64>,
    pub generated: Vec<u64>,
}

impl Golden {
    pub fn read(name: &str) -> Self {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../testdata/golden")
            .join(name);
        let ids: Value = serde_json::from_slice(&fs::read(dir.join("ids.json")).unwrap()).unwrap();
        Self {
            prompt: numbers(&ids["prompt_ids"]),
            generated: numbers(&ids["generated_ids"]),
            dir,
        }
    }

    pub fn model(&self) -> &str {
        self.dir.to_str().unwrap()
    }

    /// The prompt as the command line takes it.
    pub fn ids(&self) -> String {
        self.prompt.iter().map(u64::to_string).collect::<Vec<_>>().join(",")
    }
}

/// `k3_a` without tokens that end an answer, so that answers are as long as they may be.
pub fn endless() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(Golden::read("k3_a").dir).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
    }
    fs::write(dir.path().join("generation_config.json"), "{\"eos_token_id\": []}").unwrap();
    let path = dir.path().join("tokenizer_config.json");
    let mut tokenizer: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    tokenizer.as_object_mut().unwrap().remove("eos_token").unwrap();
    fs::write(path, tokenizer.to_string()).unwrap();
    dir
}

pub fn numbers(list: &Value) -> Vec<u64> {
    list.as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect()
}

/// Shape and values of a little-endian f32 .npy file, version 1.
pub fn read_npy(path: &Path) -> (String, Vec<f32>) {
    let bytes = fs::read(path).unwrap();
    assert_eq!(&bytes[..8], b"\x93NUMPY\x01\x00");
    let start = 10 + u16::from_le_bytes([bytes[8], bytes[9]]) as usize;
    assert!(start.is_multiple_of(64));
    let header = std::str::from_utf8(&bytes[10..start]).unwrap();
    assert!(
        header.contains("'descr': '<f4'") && header.contains("'fortran_order': False"),
        "{header}"
    );
    let shape = header.split(['(', ')']).nth(1).unwrap();
    let values = bytes[start..].as_chunks().0.iter().map(|b| f32::from_le_bytes(*b));
    (
        shape.replace(' ', "").trim_end_matches(',').to_owned(),
        values.collect(),
    )
}

/// A fresh synthetic checkpoint to be damaged: 13 layers, 14 shards.
pub struct Folder {
    dir: tempfile::TempDir,
}

impl Folder {
    pub fn new() -> Folder {
        let dir = tempfile::tempdir().unwrap();
        checkpoint::synthesize(TINY, 1, dir.path(), false, &mut |_| ()).unwrap();
        Folder { dir }
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Shard `number`, from 1.
    pub fn shard(&self, number: usize) -> PathBuf {
        self.path().join(format!("model-{number:05}-of-000014.safetensors"))
    }

    /// Changes the header of shard `number` as JSON and leaves the data alone.
    pub fn edit_header(&self, number: usize, edit: impl FnOnce(&mut Map<String, Value>)) {
        let bytes = fs::read(self.shard(number)).unwrap();
        let (length, rest) = bytes.split_first_chunk().unwrap();
        let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
        let mut header = serde_json::from_slice(header).unwrap();
        edit(&mut header);
        let header = serde_json::to_vec(&header).unwrap();
        let length = (header.len() as u64).to_le_bytes();
        fs::write(self.shard(number), [&length, header.as_slice(), data].concat()).unwrap();
    }

    /// Changes the bytes of shard `number`.
    pub fn edit_bytes(&self, number: usize, edit: impl FnOnce(&mut Vec<u8>)) {
        let mut bytes = fs::read(self.shard(number)).unwrap();
        edit(&mut bytes);
        fs::write(self.shard(number), bytes).unwrap();
    }
}
