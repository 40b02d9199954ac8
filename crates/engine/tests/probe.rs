//! What a probe sees, and that it changes nothing.

mod common;
mod plain;

use checkpoint::Checkpoint;
use common::{Golden, assert_same, bits, fed, open, plain_options, tiny};
use engine::{Cancel, Engine, PassRows, Probe, Routes};
use plain::Plain;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Guesses are compared where the plain model's choice is clearer than this; f32 moves a biased score by less.
const CLEAR: f64 = 1e-4;

/// Remembers all.
#[derive(Default)]
struct Recorder {
    widths: Vec<usize>,
    layers: Vec<(usize, Option<Routes>)>,
    guesses: Vec<(usize, Vec<Routes>)>,
}

impl Probe for Recorder {
    fn layer(&mut self, layer: usize, stream: &[f32], routes: Option<&Routes>) {
        assert!(!stream.is_empty());
        self.layers.push((layer, routes.cloned()));
    }

    fn guess_widths(&self) -> &[usize] {
        &self.widths
    }

    fn guesses(&mut self, layer: usize, guesses: &[Routes]) {
        self.guesses.push((layer, guesses.to_vec()));
    }
}

fn models() -> (Vec<PathBuf>, TempDir) {
    let tiny = tiny();
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../demo/model");
    let dirs = vec![
        tiny.path().to_owned(),
        Golden::read("k3_a").dir,
        Golden::read("k3_b").dir,
        demo,
    ];
    (dirs, tiny)
}

fn ids(n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| (i * i * 7 + 3 * i + 5) % 251).collect()
}

/// The logits of all rows of two sequences, in passes that mix them, with what a probe saw.
fn watched(engine: &mut Engine, recorder: &mut Recorder, ids: &[u32]) -> [Vec<u32>; 2] {
    let vocab = engine.config().vocab_size;
    let mut sequences = [engine.new_sequence(), engine.new_sequence()];
    let mut logits = [vec![], vec![]];
    for part in ids.chunks(9) {
        let mut parts: Vec<PassRows> = sequences
            .iter_mut()
            .map(|sequence| PassRows { sequence, ids: part })
            .collect();
        let all: Vec<usize> = (0..2 * part.len()).collect();
        let got = engine
            .pass(&mut parts, &all, &Cancel::default(), Some(recorder))
            .unwrap();
        for (logits, got) in logits.iter_mut().zip(got.chunks_exact(part.len() * vocab)) {
            logits.extend(bits(got.to_vec()));
        }
    }
    logits
}

#[test]
fn guesses_change_no_bit_and_read_no_byte() {
    let (dirs, _tiny) = models();
    let ids = ids(40);
    for dir in dirs {
        let mut engine = open(&dir, &plain_options());
        let want = fed(&mut engine, &ids, &[9]);
        let width = engine.config().num_experts_per_token;
        let mut read = vec![];
        for widths in [vec![], vec![width], vec![2 * width, 1, usize::MAX]] {
            let before = engine.stats().expert_bytes_read;
            let mut recorder = Recorder {
                widths,
                ..Recorder::default()
            };
            for got in watched(&mut engine, &mut recorder, &ids) {
                assert_same(&got, &want, &format!("{dir:?}, guesses of {:?}", recorder.widths));
            }
            read.push(engine.stats().expert_bytes_read - before);
            assert_eq!(recorder.guesses.is_empty(), recorder.widths.is_empty());
        }
        assert!(read.iter().all(|r| *r == read[0]), "{read:?}");
    }
}

#[test]
fn every_layer_with_a_router_is_guessed_once_a_pass_at_every_width() {
    let (dirs, _tiny) = models();
    for dir in dirs {
        let mut engine = open(&dir, &plain_options());
        let c = engine.config().clone();
        let mut recorder = Recorder {
            widths: vec![3, c.num_experts, c.num_experts + 1],
            ..Recorder::default()
        };
        watched(&mut engine, &mut recorder, &ids(9));
        let layers: Vec<usize> = recorder.layers.iter().map(|(layer, _)| *layer).collect();
        assert_eq!(layers, (0..c.num_hidden_layers).collect::<Vec<_>>());
        let guessed: Vec<usize> = recorder.guesses.iter().map(|(layer, _)| *layer).collect();
        let routed: Vec<usize> = (1..c.num_hidden_layers).filter(|&layer| c.is_moe(layer)).collect();
        assert_eq!(guessed, routed);
        let everything: Vec<u32> = (0..c.num_experts as u32).collect();
        for (layer, guesses) in &recorder.guesses {
            let [narrow, all, more] = &guesses[..] else {
                panic!("{} guesses for three widths", guesses.len())
            };
            assert_eq!((narrow.rows(), narrow.top_k), (18, 3), "layer {layer}");
            for row in all.experts.chunks_exact(all.top_k) {
                assert_eq!(row, everything);
            }
            assert_eq!(all, more);
            assert!(narrow.experts.chunks_exact(3).all(<[u32]>::is_sorted));
        }
    }
}

/// In the plain model the attention of the guessed layer gives zero, also where a block begins.
#[test]
fn guesses_are_the_next_router_on_the_residual_without_attention() {
    let (mut dirs, _tiny) = models();
    dirs.truncate(3);
    let ids = ids(24);
    for dir in dirs {
        let plain = Plain::read(&Checkpoint::open(&dir).unwrap(), None).run(&ids);
        let mut engine = open(&dir, &plain_options());
        let width = engine.config().num_experts_per_token;
        let mut recorder = Recorder {
            widths: vec![width, 2 * width],
            ..Recorder::default()
        };
        let parts = &mut [PassRows {
            sequence: &mut engine.new_sequence(),
            ids: &ids,
        }];
        engine
            .pass(parts, &[], &Cancel::default(), Some(&mut recorder))
            .unwrap();
        let (mut compared, mut unclear) = (0, 0);
        for (layer, guesses) in &recorder.guesses {
            for guess in guesses {
                let rows = guess.experts.chunks_exact(guess.top_k);
                for (row, (got, want)) in rows.zip(&plain.guesses[*layer]).enumerate() {
                    let (chosen, refused) = want.split_at(guess.top_k);
                    if refused.first().is_some_and(|r| chosen[guess.top_k - 1].1 - r.1 < CLEAR) {
                        unclear += 1;
                        continue;
                    }
                    let mut chosen: Vec<u32> = chosen.iter().map(|(expert, _)| *expert).collect();
                    chosen.sort_unstable();
                    assert_eq!(got, chosen, "{dir:?} layer {layer} row {row}");
                    compared += 1;
                }
            }
        }
        assert!(unclear * 20 < compared, "{dir:?}: {unclear} of {compared}");
        // A guess is not what came: attention matters.
        let came = recorder.layers.iter().filter_map(|(_, routes)| routes.as_ref());
        let guessed = recorder.guesses.iter().map(|(_, guesses)| &guesses[0]);
        assert!(came.zip(guessed).any(|(came, guessed)| came.experts != guessed.experts));
    }
}
