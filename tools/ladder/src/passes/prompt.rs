//! A prompt of 512 tokens: in one pass, in passes of 64 rows, and without waiting for the drive.

use engine::{Cancel, greedy};
use serde::Serialize;

use crate::rig::{Mark, Rig, median};
use crate::{Result, machine};

/// Tokens of the prompt.
const TOKENS: usize = 512;
/// Rows of the passes that it is compared with.
const SHORT_PASS: usize = 64;
/// Time to the first token may be so many times the larger of the read bound and the compute time.
const TARGET: f64 = 1.10;

/// What a device delivers at least.
const PAGE_BYTES: u64 = 4096;

const ONE_PASS: &str = "one pass";
const SHORT_PASSES: &str = "passes of 64 rows";
/// From the disk on which the model lies, which is faster than the compute: nearly nothing but compute.
const COMPUTE: &str = "compute";

/// A prompt, in the words of the raw data.
#[derive(Serialize)]
pub struct Run {
    pub name: &'static str,
    pub round: usize,
    /// Until the first token is chosen.
    pub first_token_s: f64,
    pub passes: u64,
    /// One for each pass and layer with experts.
    pub barriers: u64,
    pub bytes_needed: u64,
    pub bytes_read: u64,
    pub device_bytes: u64,
    pub served_bytes: u64,
    /// Device bytes through the drive's bandwidth.
    pub read_bound_s: Option<f64>,
    /// Bytes read, in experts of all layers: at most 1 for each pass when none is asked for twice.
    pub share_of_experts: f64,
    /// Whether nothing was read twice, and the drive served what the engine accounts for, less what lies in the last page of a shard beyond
    /// the shard's end.
    pub as_accounted: bool,
    /// Processes ready to run, averaged over the minute before.
    pub load: f64,
}

/// Each way once.
pub fn round(rig: &Rig, round: usize) -> Result<Vec<Run>> {
    [
        (ONE_PASS, true, TOKENS),
        (SHORT_PASSES, true, SHORT_PASS),
        (COMPUTE, false, TOKENS),
    ]
    .into_iter()
    .map(|(name, paced, rows)| {
        let run = run(rig, name, round, paced, rows)?;
        println!(
            "{name}, round {}: first token after {:.2} s, {} passes, {:.0} MB, load {:.1}",
            round + 1,
            run.first_token_s,
            run.passes,
            run.device_bytes as f64 / 1e6,
            run.load
        );
        Ok(run)
    })
    .collect()
}

fn run(rig: &Rig, name: &'static str, round: usize, paced: bool, rows: usize) -> Result<Run> {
    let load = machine::load();
    let mut running = rig.open(paced, rows, 1)?;
    let control = running.control();
    let engine = &mut running.engine;
    let (c, checkpoint) = (engine.config(), engine.checkpoint());
    let vocabulary = c.vocab_size as u32;
    let expert_bytes = checkpoint.expert(c.num_hidden_layers - 1, 0)?.bytes();
    let (layers, experts) = (c.moe_layers() as u64, (c.moe_layers() * c.num_experts) as u64);
    let ids: Vec<u32> = (0..TOKENS as u32)
        .map(|n| (n * n * 31 + 7 * n + 11) % vocabulary)
        .collect();
    let mut sequence = engine.new_sequence();
    let start = Mark::set(engine, control.as_ref());
    let logits = engine.prefill(&mut sequence, &ids, &Cancel::default(), &mut |_| ())?;
    let _first = greedy(&logits);
    let time_s = start.until_now(engine, control.as_ref()).time_s;
    engine.settle();
    let made = start.until_now(engine, control.as_ref());
    let passes = TOKENS.div_ceil(rows) as u64;
    Ok(Run {
        name,
        round,
        first_token_s: time_s,
        passes: made.passes,
        barriers: made.barriers,
        bytes_needed: made.needed,
        bytes_read: made.read,
        device_bytes: made.device,
        served_bytes: made.served,
        read_bound_s: paced.then_some(made.device as f64 / rig.rate),
        share_of_experts: made.read as f64 / (experts * expert_bytes) as f64,
        as_accounted: made.read == made.needed
            && made.passes == passes
            && made.barriers == passes * layers
            && made.read <= passes * experts * expert_bytes
            && (!paced || (made.served..=made.served + made.barriers * PAGE_BYTES).contains(&made.device)),
        load,
    })
}

/// Medians against the target.
pub fn table(runs: &[Run]) -> String {
    let of = |name: &'static str| runs.iter().filter(move |run| run.name == name);
    let time = |name| median(of(name).map(|run| run.first_token_s));
    let bound = |name| median(of(name).filter_map(|run| run.read_bound_s));
    let mut text =
        format!("{TOKENS} tokens           first token   read bound   device bytes   experts read   accounted\n");
    for name in [ONE_PASS, SHORT_PASSES, COMPUTE] {
        let bound = of(name)
            .all(|run| run.read_bound_s.is_some())
            .then(|| format!("{:.2} s", bound(name)));
        text += &format!(
            "{name:<20} {:>9.2} s   {:>10}   {:>9.0} MB   {:>12.2}   {}\n",
            time(name),
            bound.unwrap_or_default(),
            median(of(name).map(|run| run.device_bytes as f64)) / 1e6,
            median(of(name).map(|run| run.share_of_experts)),
            if of(name).all(|run| run.as_accounted) {
                "yes"
            } else {
                "NO"
            }
        );
    }
    // Each round against itself: a machine that changes changes both.
    let rounds = |name: &'static str| of(name).map(|run| run.first_token_s).collect::<Vec<f64>>();
    let (one, short, compute) = (rounds(ONE_PASS), rounds(SHORT_PASSES), rounds(COMPUTE));
    let floor = of(ONE_PASS)
        .zip(&compute)
        .map(|(run, &compute)| run.first_token_s / run.read_bound_s.unwrap_or_default().max(compute));
    let over = median(floor);
    let gain = median(short.iter().zip(&one).map(|(short, one)| short / one));
    text += &format!(
        "first token: {over:.3} x max(read bound, compute), target {TARGET:.2}{}; passes of {SHORT_PASS} rows take {gain:.2} x as long",
        if over <= TARGET { "" } else { ", MISSED" }
    );
    text
}
