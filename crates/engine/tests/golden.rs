//! Checkpoints with known answers: `testdata/golden`, computed in f64 by a reference that shares no code with us.

mod common;

use common::{Golden, open, plain_options};
use engine::{Cancel, PassRows, Request, Sampling};
use std::ops::ControlFlow;

/// The published bound for an f32 engine against the f64 reference.
const TOLERANCE: f32 = 2e-3;

fn prompt_logits(name: &str) {
    let golden = Golden::read(name);
    let mut engine = open(&golden.dir, &plain_options());
    let mut sequence = engine.new_sequence();
    let all: Vec<usize> = (0..golden.prompt.len()).collect();
    let mut seen = vec![];
    let mut probe = |layer: usize, stream: &[f32], routes: Option<&engine::Routes>| {
        seen.push((layer, stream.to_vec(), routes.cloned()));
    };
    let parts = &mut [PassRows {
        sequence: &mut sequence,
        ids: &golden.prompt,
    }];
    let logits = engine.pass(parts, &all, &Cancel::default(), Some(&mut probe)).unwrap();
    let worst = common::largest_difference(&logits, &golden.prompt_logits);
    println!("{name}: largest difference of prompt logits {worst:e}");
    assert!(worst < TOLERANCE, "{name}: prompt logits differ by {worst}");

    let hidden = engine.config().hidden_size;
    assert_eq!(seen.len(), golden.trace.len());
    for ((layer, stream, routes), want) in seen.iter().zip(&golden.trace) {
        assert_eq!(*layer, want.layer);
        let last = &stream[stream.len() - hidden..];
        for (got, want) in last.iter().zip(&want.stream_last_token_first8) {
            assert!(
                (got - want).abs() < 1e-4,
                "{name} layer {layer}: stream {got} for {want}"
            );
        }
        for (row, want) in stream.chunks_exact(hidden).zip(&want.stream_rms_per_position) {
            let rms = (row.iter().map(|x| x * x).sum::<f32>() / hidden as f32).sqrt();
            assert!((rms - want).abs() < 1e-4, "{name} layer {layer}: rms {rms} for {want}");
        }
        match (&want.experts_per_position, routes) {
            (None, None) => {}
            (Some(want), Some(got)) => {
                let got: Vec<&[u32]> = got.experts.chunks_exact(got.top_k).collect();
                assert_eq!(got, *want, "{name} layer {layer}: routes");
            }
            _ => panic!("{name} layer {layer}: dense where experts were expected, or the reverse"),
        }
    }
}

fn greedy_ids(name: &str) {
    let golden = Golden::read(name);
    let mut engine = open(&golden.dir, &plain_options());
    let mut sequence = engine.new_sequence();
    let request = Request {
        prompt: golden.prompt.clone(),
        max_tokens: golden.generated.len(),
        stop_ids: vec![],
        sampling: Sampling::default(),
    };
    let made = engine
        .generate(&mut sequence, &request, &Cancel::default(), &mut |_| {
            ControlFlow::Continue(())
        })
        .unwrap();
    assert_eq!(made.ids, golden.generated, "{name}: greedy ids");
    let stats = engine.stats();
    assert_eq!(
        stats.expert_bytes_read + stats.expert_bytes_cached,
        stats.expert_bytes_needed
    );
    assert!(stats.device_bytes >= stats.expert_bytes_read);
}

#[test]
fn k3_a_prompt_logits_streams_and_routes() {
    prompt_logits("k3_a");
}

#[test]
fn k3_b_prompt_logits_streams_and_routes() {
    prompt_logits("k3_b");
}

#[test]
fn k3_a_greedy_ids() {
    greedy_ids("k3_a");
}

#[test]
fn k3_b_greedy_ids() {
    greedy_ids("k3_b");
}
