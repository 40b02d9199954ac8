//! What the engine's tests share.
#![allow(dead_code)] // each test file uses its part

use checkpoint::Checkpoint;
use engine::{Cancel, Engine, Options, PassRows, Sequence};
use serde::Deserialize;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Room for the small models of the tests. Nothing stays in memory, so that what is needed is read.
pub fn plain_options() -> Options {
    Options {
        cache: Some(0),
        memory: 1 << 30,
        threads: 2,
        positions: 512,
        ..Default::default()
    }
}

/// splitmix64.
pub struct Random(pub u64);

impl Random {
    /// A number below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) % n as u64) as usize
    }
}

pub fn open(dir: &Path, options: &Options) -> Engine {
    let checkpoint = Checkpoint::open(dir).unwrap();
    Engine::open(checkpoint, options, &mut |_| ()).unwrap()
}

/// The tiny model, whose weights anyone can recompute, in a folder of its own.
pub fn tiny() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    checkpoint::tiny::write_tiny(dir.path()).unwrap();
    dir
}

#[derive(Deserialize)]
pub struct LayerTrace {
    pub layer: usize,
    pub stream_last_token_first8: Vec<f32>,
    pub stream_rms_per_position: Vec<f32>,
    pub experts_per_position: Option<Vec<Vec<u32>>>,
}

#[derive(Deserialize)]
struct Ids {
    prompt_ids: Vec<u32>,
    generated_ids: Vec<u32>,
    long_prompt_ids: Vec<u32>,
}

/// A checkpoint with known answers.
pub struct Golden {
    pub dir: PathBuf,
    pub prompt: Vec<u32>,
    pub long_prompt: Vec<u32>,
    pub generated: Vec<u32>,
    pub prompt_logits: Vec<f32>,
    pub trace: Vec<LayerTrace>,
}

impl Golden {
    pub fn read(name: &str) -> Self {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../testdata/golden")
            .join(name);
        let text = |file: &str| std::fs::read_to_string(dir.join(file)).unwrap();
        let ids: Ids = serde_json::from_str(&text("ids.json")).unwrap();
        Self {
            prompt: ids.prompt_ids,
            long_prompt: ids.long_prompt_ids,
            generated: ids.generated_ids,
            prompt_logits: read_npy(&dir.join("prompt_logits_f64ref.npy")),
            trace: serde_json::from_str(&text("trace.json")).unwrap(),
            dir,
        }
    }
}

/// The numbers of a little-endian f32 .npy file, version 1.
pub fn read_npy(path: &Path) -> Vec<f32> {
    let bytes = std::fs::read(path).unwrap();
    assert_eq!(&bytes[..6], b"\x93NUMPY");
    let header = 10 + u16::from_le_bytes([bytes[8], bytes[9]]) as usize;
    assert!(std::str::from_utf8(&bytes[10..header]).unwrap().contains("'<f4'"));
    bytes[header..]
        .as_chunks::<4>()
        .0
        .iter()
        .map(|b| f32::from_le_bytes(*b))
        .collect()
}

pub fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

pub fn bits(logits: Vec<f32>) -> Vec<u32> {
    logits.into_iter().map(f32::to_bits).collect()
}

/// The logits after each of `ids`.
pub fn pass(engine: &mut Engine, sequence: &mut Sequence, ids: &[u32]) -> Vec<u32> {
    let all: Vec<usize> = (0..ids.len()).collect();
    let parts = &mut [PassRows { sequence, ids }];
    bits(engine.pass(parts, &all, &Cancel::default(), None).unwrap())
}

/// The logits after each of `ids`, fed in passes of the given sizes, which repeat.
pub fn fed(engine: &mut Engine, ids: &[u32], sizes: &[usize]) -> Vec<u32> {
    let mut sequence = engine.new_sequence();
    let mut sizes = sizes.iter().cycle();
    let mut logits = vec![];
    while sequence.ids().len() < ids.len() {
        let rest = &ids[sequence.ids().len()..];
        let part = &rest[..rest.len().min(*sizes.next().unwrap())];
        logits.extend(pass(engine, &mut sequence, part));
    }
    assert_eq!(sequence.ids(), ids);
    logits
}

/// Not `assert_eq`, which would print a hundred thousand numbers.
pub fn assert_same(got: &[u32], want: &[u32], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    let other = got.iter().zip(want).position(|(a, b)| a != b);
    assert_eq!(other, None, "{what}: first number with other bits");
}
