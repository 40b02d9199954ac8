//! Batches of 1 to 64 sequences: tokens a second against what the union of their routes allows.

use std::ops::ControlFlow;

use engine::{Batch, Cancel, Fairness, Request, Sampling};
use serde::Serialize;

use crate::rig::{Mark, Rig, median};
use crate::{Result, machine};

const SIZES: [usize; 7] = [1, 2, 4, 8, 16, 32, 64];
/// Tokens of each prompt.
const PROMPT: usize = 4;
/// Share of the tokens a second that the union allows.
const TARGET: f64 = 0.95;

/// Some passes of a batch, in the words of the raw data.
#[derive(Serialize)]
pub struct Run {
    pub sequences: usize,
    pub round: usize,
    pub passes: u64,
    pub time_s: f64,
    pub tok_per_s: f64,
    pub bytes_needed: u64,
    pub bytes_read: u64,
    pub device_bytes: u64,
    pub served_bytes: u64,
    pub bytes_per_token: f64,
    /// Experts that the rows take, through those of the union: rows x top-k / union.
    pub sharing: f64,
    /// Tokens a second if nothing took time but the device bytes at the drive's bandwidth.
    pub allowed_tok_per_s: f64,
    pub fraction: f64,
    pub load: f64,
}

/// Each size once.
pub fn round(rig: &Rig, round: usize, passes: usize) -> Result<Vec<Run>> {
    let most = SIZES[SIZES.len() - 1];
    let mut running = rig.open(true, most * PROMPT, most)?;
    let control = running.control();
    let engine = &mut running.engine;
    let (c, checkpoint) = (engine.config(), engine.checkpoint());
    let (vocabulary, taken) = (c.vocab_size, c.num_experts_per_token * c.moe_layers());
    let expert_bytes = checkpoint.expert(c.num_hidden_layers - 1, 0)?.bytes();
    let cancel = Cancel::default();
    let mut runs = vec![];
    for sequences in SIZES {
        let load = machine::load();
        let mut batch = Batch::new(engine, Fairness::FullPasses);
        for which in 0..sequences {
            let request = Request {
                prompt: (0..PROMPT)
                    .map(|n| ((which * 37 + n * 101 + 5) % vocabulary) as u32)
                    .collect(),
                max_tokens: passes + 1,
                stop_ids: vec![],
                sampling: Sampling {
                    temperature: 1.0,
                    seed: which as u64,
                    ..Sampling::default()
                },
            };
            batch.join(engine, request, ())?;
        }
        let go_on = &mut |_: &mut (), _| ControlFlow::Continue(());
        batch.step(engine, &cancel, None, go_on)?;
        let start = Mark::set(engine, control.as_ref());
        while !batch.is_empty() {
            batch.step(engine, &cancel, None, go_on)?;
        }
        let made = start.until_now(engine, control.as_ref());
        let tokens = (sequences * passes) as f64;
        let allowed = tokens / (made.device as f64 / rig.rate);
        let run = Run {
            sequences,
            round,
            passes: made.passes,
            time_s: made.time_s,
            tok_per_s: tokens / made.time_s,
            bytes_needed: made.needed,
            bytes_read: made.read,
            device_bytes: made.device,
            served_bytes: made.served,
            bytes_per_token: made.read as f64 / tokens,
            sharing: tokens * taken as f64 / (made.read / expert_bytes) as f64,
            allowed_tok_per_s: allowed,
            fraction: tokens / made.time_s / allowed,
            load,
        };
        println!(
            "{sequences} sequences, round {}: {:.2} tokens/s, {:.1} % of the bound, load {load:.1}",
            round + 1,
            run.tok_per_s,
            100.0 * run.fraction
        );
        runs.push(run);
    }
    Ok(runs)
}

/// Medians against the target.
pub fn table(runs: &[Run]) -> String {
    let mut text = String::from(
        "sequences   MB a token   rows x top-k / union   tokens/s   allowed   fraction   of one's tokens/s x sharing\n",
    );
    let of = |size: usize| runs.iter().filter(move |run| run.sequences == size);
    let alone = median(of(1).map(|run| run.tok_per_s));
    for size in SIZES {
        let middle = |value: fn(&Run) -> f64| median(of(size).map(value));
        let fraction = middle(|run| run.fraction);
        let by_sharing = middle(|run| run.tok_per_s) / alone / middle(|run| run.sharing);
        text += &format!(
            "{size:>9}   {:>10.2}   {:>20.2}   {:>8.2}   {:>7.2}   {:>6.1} %   {:>6.1} %{}\n",
            middle(|run| run.bytes_per_token) / 1e6,
            middle(|run| run.sharing),
            middle(|run| run.tok_per_s),
            middle(|run| run.allowed_tok_per_s),
            100.0 * fraction,
            100.0 * by_sharing,
            if fraction >= TARGET { "" } else { "   below the target" }
        );
    }
    text + &format!(
        "target: {:.0} % of the tokens a second that the union allows",
        100.0 * TARGET
    )
}
