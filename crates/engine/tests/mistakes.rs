//! The engine against the tests' own plain model, and what each known mistake would do to its numbers.

mod common;
mod plain;

use checkpoint::Checkpoint;
use common::{Golden, open, plain_options, tiny};
use engine::{Cancel, Options, PassRows};
use plain::{Mistake, Plain, Run};
use std::path::Path;

/// What an f32 engine may differ by on the tiny model: rounding alone moves its logits by less than a tenth of it.
const TOLERANCE: f64 = 2e-4;

/// The same for the golden checkpoints.
const GOLDEN_TOLERANCE: f64 = 2e-3;

/// Half of the last digit of the published numbers, and a little for the way to them.
const DIGITS: f64 = 6e-7;

// Published with the tiny model's recipe: an f64 NumPy run over these ids.
const IDS: [u32; 20] = [3, 1, 4, 1, 5, 9, 2, 6, 5, 35, 8, 97, 93, 23, 84, 62, 64, 33, 83, 27];
const ARGMAX: [usize; 20] = [
    488, 52, 100, 419, 182, 272, 97, 457, 233, 423, 323, 126, 331, 358, 34, 217, 87, 476, 222, 469,
];
const FIRST_LOGITS: [f64; 4] = [-0.092801, -1.946782, -2.592639, -0.557992];
const LAST_LOGITS: [f64; 8] = [
    -0.295437, 0.286643, -0.413371, -1.015142, 1.722810, 1.083808, 1.190426, 0.017853,
];
const LAST_TOP: [(usize, f64); 3] = [(469, 3.066059), (476, 3.042663), (120, 2.941855)];
/// The last token's stream after each layer: its first four numbers and its root mean square.
const STREAM: [([f64; 4], f64); 13] = [
    ([0.245732, -0.794788, 0.416787, -0.429084], 0.860881),
    ([0.592014, 1.220924, -1.520796, 1.187245], 1.396902),
    ([-1.650175, -0.890269, -1.444535, 2.453489], 1.813428),
    ([1.522873, -1.146223, -0.329830, -0.561608], 1.152706),
    ([2.076525, -1.106985, -1.335074, -1.138593], 1.740639),
    ([4.073176, -0.610875, -1.169338, 0.369357], 2.140934),
    ([0.992750, -1.382562, -2.580765, -0.643435], 1.291649),
    ([0.876412, -2.513523, -3.951373, -0.827184], 1.787989),
    ([-0.052107, -0.648956, -5.844176, -0.076014], 2.251723),
    ([-0.517532, -0.603094, 1.680686, -0.682610], 1.288934),
    ([-0.992536, -0.812638, 0.647716, -1.314662], 1.811604),
    ([-1.145899, 0.183323, 0.577812, -0.031013], 2.350955),
    ([0.924873, -0.919381, 1.373515, 0.064471], 1.223621),
];

/// What a mistake changes on the tiny model: the largest change of a logit, rounded (4.449 was published as 4.5), and at how
/// many of the 20 positions another logit becomes the largest.
const SEEN: [(Mistake, f64, usize); 14] = [
    (Mistake::DecayRatePerChannel, 5.0, 19),
    (Mistake::ClampedSoftplusDecay, 4.9, 19),
    (Mistake::GateBeforeNorm, 4.6, 20),
    (Mistake::ResidualValuesNormed, 5.9, 20),
    (Mistake::ResidualScoresScaled, 5.0, 20),
    (Mistake::EmbeddingDropped, 5.0, 20),
    (Mistake::BlocksOfFour, 4.5, 19),
    (Mistake::NibblesSwapped, 5.2, 20),
    (Mistake::NoLatentNorm, 6.1, 19),
    (Mistake::BiasedWeights, 5.3, 19),
    (Mistake::ScaleWithoutShared, 3.3, 11),
    (Mistake::Silu, 4.6, 18),
    (Mistake::UpNotCapped, 1.9, 6),
    (Mistake::SigmoidOfCappedGate, 4.0, 17),
];

fn plain_run(dir: &Path, ids: &[u32], mistake: Option<Mistake>) -> Run {
    Plain::read(&Checkpoint::open(dir).unwrap(), mistake).run(ids)
}

/// The engine's run in the plain model's form; the margin, which it does not show, is left at 0.
fn engine_run(dir: &Path, ids: &[u32], options: &Options) -> Run {
    let mut engine = open(dir, options);
    let (hidden, vocab) = (engine.config().hidden_size, engine.config().vocab_size);
    let rows = |numbers: &[f32], width| -> Vec<Vec<f64>> {
        let rows = numbers.chunks_exact(width);
        rows.map(|row| row.iter().map(|x| *x as f64).collect()).collect()
    };
    let mut run = Run::default();
    let mut probe = |layer: usize, stream: &[f32], routes: Option<&engine::Routes>| {
        assert_eq!(layer, run.streams.len());
        run.streams.push(rows(stream, hidden));
        let routes = routes.map_or(vec![], |r| {
            r.experts.chunks_exact(r.top_k).map(<[u32]>::to_vec).collect()
        });
        run.routes.push(routes);
    };
    let mut sequence = engine.new_sequence();
    let sequence = &mut sequence;
    let all: Vec<usize> = (0..ids.len()).collect();
    let parts = &mut [PassRows { sequence, ids }];
    let logits = engine.pass(parts, &all, &Cancel::default(), Some(&mut probe)).unwrap();
    run.logits = rows(&logits, vocab);
    run
}

fn largest_difference(a: &[Vec<f64>], b: &[Vec<f64>]) -> f64 {
    assert_eq!(a.len(), b.len());
    let differences = a.iter().zip(b).flat_map(|(a, b)| {
        assert_eq!(a.len(), b.len());
        a.iter().zip(b).map(|(a, b)| (a - b).abs())
    });
    // A NaN must not hide.
    differences.fold(0.0, |most, d| if d <= most { most } else { d })
}

fn argmax(logits: &[Vec<f64>]) -> Vec<usize> {
    let best = |row: &Vec<f64>| (0..row.len()).max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap();
    logits.iter().map(best).collect()
}

fn near(got: f64, want: f64, tolerance: f64, what: &str) {
    assert!((got - want).abs() < tolerance, "{what}: {got} for {want}");
}

fn has_the_published_numbers(run: &Run, tolerance: f64) {
    assert_eq!(argmax(&run.logits), ARGMAX);
    let last = &run.logits[IDS.len() - 1];
    for (i, want) in FIRST_LOGITS.iter().enumerate() {
        near(run.logits[0][i], *want, tolerance, "first logits");
    }
    for (i, want) in LAST_LOGITS.iter().enumerate() {
        near(last[i], *want, tolerance, "last logits");
    }
    let mut order: Vec<usize> = (0..last.len()).collect();
    order.sort_by(|a, b| last[*b].total_cmp(&last[*a]));
    for (id, (want, logit)) in order.iter().zip(LAST_TOP) {
        assert_eq!(*id, want);
        near(last[*id], logit, tolerance, "largest logits");
    }
    assert_eq!(run.streams.len(), STREAM.len());
    for (layer, (stream, (first, rms))) in run.streams.iter().zip(STREAM).enumerate() {
        let row = &stream[IDS.len() - 1];
        for (got, want) in row.iter().zip(first) {
            near(*got, want, tolerance, &format!("stream after layer {layer}"));
        }
        let got = (plain::dot(row, row) / row.len() as f64).sqrt();
        near(got, rms, tolerance, &format!("rms after layer {layer}"));
    }
}

#[test]
fn the_plain_model_gives_the_tiny_models_published_numbers() {
    let run = plain_run(tiny().path(), &IDS, None);
    has_the_published_numbers(&run, DIGITS);
    near(run.router_margin, 5.2e-4, 5e-6, "smallest router margin");
}

#[test]
fn the_plain_model_gives_the_golden_logits() {
    for name in ["k3_a", "k3_b"] {
        let golden = Golden::read(name);
        let run = plain_run(&golden.dir, &golden.prompt, None);
        let want: Vec<f64> = golden.prompt_logits.iter().map(|x| *x as f64).collect();
        let worst = largest_difference(&[run.logits.concat()], &[want]);
        println!("{name}: plain model and reference differ by {worst:e}");
        assert!(worst < 1e-5, "{name}: {worst}"); // the reference is rounded to f32
    }
}

#[test]
fn the_engine_gives_the_tiny_models_published_numbers() {
    let dir = tiny();
    let run = engine_run(dir.path(), &IDS, &plain_options());
    has_the_published_numbers(&run, TOLERANCE);
    let plain = plain_run(dir.path(), &IDS, None);
    assert_eq!(run.routes, plain.routes);
    let logits = largest_difference(&run.logits, &plain.logits);
    println!("tiny: engine and plain model differ by {logits:e} in logits");
    assert!(logits < TOLERANCE, "logits differ by {logits}");
    for (layer, (got, want)) in run.streams.iter().zip(&plain.streams).enumerate() {
        let stream = largest_difference(got, want);
        println!("tiny: after layer {layer} by {stream:e}");
        assert!(stream < TOLERANCE, "streams after layer {layer} differ by {stream}");
    }
}

/// Without a mistake the two agree within [`TOLERANCE`], so a change of this size is a failure of the test above.
#[test]
fn each_mistake_would_be_seen() {
    let dir = tiny();
    let engine = engine_run(dir.path(), &IDS, &plain_options());
    for (mistake, change, moved) in SEEN {
        let wrong = plain_run(dir.path(), &IDS, Some(mistake));
        let found = largest_difference(&wrong.logits, &engine.logits);
        let other = argmax(&wrong.logits)
            .iter()
            .zip(ARGMAX)
            .filter(|(a, b)| **a != *b)
            .count();
        println!("{mistake:?}: {found:.3}, {other} of {}", IDS.len());
        assert!(found > TOLERANCE, "{mistake:?} would pass: {found}");
        near(found, change, 0.06, &format!("{mistake:?}"));
        assert_eq!(other, moved, "{mistake:?}: positions with another largest logit");
    }
}

/// Two epsilons are too small to be seen on the tiny model; k3_a was made so that they can be.
#[test]
fn each_wrong_epsilon_would_be_seen_on_k3_a() {
    let dir = tiny();
    let golden = Golden::read("k3_a");
    let right = plain_run(dir.path(), &IDS, None);
    let engine = engine_run(&golden.dir, &golden.prompt, &plain_options());
    let exact = plain_run(&golden.dir, &golden.prompt, None);
    let agree = largest_difference(&engine.logits, &exact.logits);
    println!("k3_a: engine and plain model differ by {agree:e}");
    assert!(agree < GOLDEN_TOLERANCE, "{agree}");
    for (mistake, tiny_change, change, last_digit) in [
        (Mistake::MlaEps, 7e-5, 0.5, 0.05),
        (Mistake::L2Eps, 1.3e-4, 0.025, 0.0005),
    ] {
        let wrong = plain_run(dir.path(), &IDS, Some(mistake));
        let found = largest_difference(&wrong.logits, &right.logits);
        println!("{mistake:?}: {found:e} on the tiny model");
        near(found, tiny_change, 5e-6, &format!("{mistake:?} on the tiny model"));
        assert_eq!(argmax(&wrong.logits), ARGMAX);
        let wrong = plain_run(&golden.dir, &golden.prompt, Some(mistake));
        let found = largest_difference(&wrong.logits, &engine.logits);
        println!("{mistake:?}: {found:e} on k3_a");
        assert!(found > GOLDEN_TOLERANCE, "{mistake:?} would pass: {found}");
        near(
            found,
            change,
            last_digit + GOLDEN_TOLERANCE,
            &format!("{mistake:?} on k3_a"),
        );
    }
}

#[test]
fn the_epsilon_inside_mla_is_a_parameter() {
    let golden = Golden::read("k3_a");
    let options = Options {
        mla_eps: 1e-5,
        ..plain_options()
    };
    let engine = engine_run(&golden.dir, &golden.prompt, &options);
    let plain = plain_run(&golden.dir, &golden.prompt, Some(Mistake::MlaEps));
    let worst = largest_difference(&engine.logits, &plain.logits);
    println!("k3_a with 1e-5 inside MLA: {worst:e}");
    assert!(worst < GOLDEN_TOLERANCE, "{worst}");
}
