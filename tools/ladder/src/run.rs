//! One run of one rung.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use checkpoint::Checkpoint;
use engine::{Cancel, Engine, Measure, NamedDrive, Options, Placement, greedy};
use paced_drive::{Command, Control, Pace, PacedDrive};
use serde::Serialize;

use crate::model::{Model, PROMPT};
use crate::mounts::{clean, warm};
use crate::rungs::{RATES, Rung};
use crate::{Result, machine};

/// Memory of the engine: the trunk, and slots for two barriers.
const MEMORY: u64 = 1 << 30;

/// A run, in the words of the raw data: bytes and seconds of its timed tokens. Where a drive was slowed, `served_bytes`, `time_s`, `fraction`,
/// `share` and `sum_ceiling` are those from that moment on.
#[derive(Serialize)]
pub struct Run {
    pub rung: String,
    pub round: usize,
    pub drives: usize,
    pub layout: &'static str,
    /// Layers that are guessed ahead.
    pub lookahead: usize,
    pub tok_per_s: f64,
    /// Bytes of experts that the tokens need.
    pub bytes_needed: u64,
    /// Bytes of experts that were read.
    pub bytes_read: u64,
    /// Bytes that the devices delivered, by the engine's account.
    pub device_bytes: u64,
    /// Bytes that the paced drives served, by their own count.
    pub served_bytes: u64,
    /// Sum of the drives' bandwidths, in bytes a second.
    pub sum_ceiling: f64,
    /// The barriers' bounds added up.
    pub bound_s: f64,
    /// The barriers' times added up, from each demand to its last landing.
    pub barrier_s: f64,
    pub barriers: u64,
    pub time_s: f64,
    /// Served bytes through `sum_ceiling` and `time_s`.
    pub fraction: f64,
    /// Each drive's share of the bytes.
    pub share: Vec<f64>,
    /// Each drive's share of the sum.
    pub share_of_sum: Vec<f64>,
    /// Seconds in which each drive had nothing to do while something waited that it holds.
    pub idle_s: Vec<f64>,
    /// The most by which a paced drive was late with an answer: what the machine could not keep up with.
    pub latest_ms: f64,
    /// The longest that a paced drive took to fetch the data of a read: with the page cache warm, next to nothing.
    pub slowest_fetch_ms: f64,
    /// Load of the machine.
    pub load: f64,
}

/// Sums at one moment.
struct Mark {
    at: Instant,
    needed: u64,
    read: u64,
    device: u64,
    barriers: u64,
    bound_ns: u64,
    barrier_ns: u64,
    idle_ns: Vec<u64>,
    served: Vec<u64>,
}

impl Mark {
    fn set(engine: &Engine, controls: &[Control]) -> Self {
        let (stats, counters) = (engine.stats(), engine.streamer().counters());
        Self {
            at: Instant::now(),
            needed: stats.expert_bytes_needed,
            read: counters.expert_bytes_read,
            device: counters.device_bytes,
            barriers: counters.barriers,
            bound_ns: counters.barrier_bound_ns,
            barrier_ns: counters.barrier_time_ns,
            idle_ns: engine
                .streamer()
                .drive_counters()
                .iter()
                .map(|drive| drive.idle_ns)
                .collect(),
            served: served(controls),
        }
    }
}

fn served(controls: &[Control]) -> Vec<u64> {
    controls.iter().map(|control| control.status().bytes).collect()
}

/// Mounts the rung's drives, opens the model on them and generates.
pub fn run(model: &Model, rung: &Rung, round: usize, tokens: usize, scratch: &Path) -> Result<Run> {
    let folders: BTreeSet<&PathBuf> = rung.served.iter().collect();
    folders.into_iter().try_for_each(|folder| warm(folder))?;
    let load = machine::load();
    let mut drives = Vec::new();
    for (number, (folder, rate)) in rung.served.iter().zip(RATES).enumerate() {
        let at = scratch.join(format!("mount-{number}"));
        clean(&at)?;
        let pace = Pace {
            rate,
            ..Pace::default()
        };
        drives.push(PacedDrive::mount(folder, &at, pace)?);
    }
    let controls: Vec<Control> = drives.iter().map(PacedDrive::control).collect();
    let named = |drive: &PacedDrive| NamedDrive {
        path: drive.path().to_owned(),
        note: String::new(),
    };
    let options = Options {
        memory: MEMORY,
        positions: PROMPT.len() + 2 * tokens + 1,
        pass_rows: PROMPT.len(),
        placement: Placement {
            drives: drives.iter().map(named).collect(),
            model_folder: false,
        },
        cache: Some(0),
        measure: Measure::Always,
        // The other processor is for the drives, which are threads here.
        threads: 1,
        ..Options::default()
    };
    let mut engine = Engine::open(Checkpoint::open(&model.dir)?, &options, &mut |_| ())?;
    let mut sequence = engine.new_sequence();
    let cancel = Cancel::default();
    let mut ids = PROMPT.to_vec();
    let mut token = |engine: &mut Engine| -> Result<()> {
        let logits = engine.prefill(&mut sequence, &ids, &cancel, &mut |_| ())?;
        ids = vec![greedy(&logits)];
        Ok(())
    };
    token(&mut engine)?;
    let start = Mark::set(&engine, &controls);
    let (mut slowed, mut timed) = (None, 0);
    let mut rates = RATES[..drives.len()].to_vec();
    if rung.slowed {
        // About in the middle of the next token, wherever in a barrier that is.
        for _ in 0..tokens / 2 {
            token(&mut engine)?;
        }
        let after = start.at.elapsed() / tokens as u32;
        timed += tokens / 2;
        let (control, half) = (controls[0].clone(), rates[0] / 2.0);
        let watched = controls.clone();
        let slow = std::thread::spawn(move || {
            std::thread::sleep(after);
            control.run(Command::Rate(half));
            (Instant::now(), served(&watched))
        });
        rates[0] = half;
        slowed = Some(slow);
    }
    for _ in 0..tokens {
        token(&mut engine)?;
    }
    timed += tokens;
    let end = Mark::set(&engine, &controls);
    let slowed = slowed
        .map(|slow| slow.join())
        .transpose()
        .map_err(|_| "the thread that slows a drive panicked")?;
    let latest_ns = controls.iter().map(|control| control.status().latest_ns).max();
    let slowest_fetch_ns = controls.iter().map(|control| control.status().slowest_fetch_ns).max();
    drop(engine);
    drop(drives);
    let (from, from_served) = slowed.unwrap_or((start.at, start.served));
    let time_s = (end.at - from).as_secs_f64();
    let served: Vec<u64> = end
        .served
        .iter()
        .zip(&from_served)
        .map(|(end, start)| end - start)
        .collect();
    let served_bytes: u64 = served.iter().sum();
    let sum_ceiling: f64 = rates.iter().sum();
    let seconds = |ns: u64| Duration::from_nanos(ns).as_secs_f64();
    let part = |share: f64, of: f64| if of > 0.0 { share / of } else { 0.0 };
    Ok(Run {
        rung: rung.name.clone(),
        round,
        drives: rates.len(),
        layout: rung.layout,
        lookahead: 0,
        tok_per_s: timed as f64 / (end.at - start.at).as_secs_f64(),
        bytes_needed: end.needed - start.needed,
        bytes_read: end.read - start.read,
        device_bytes: end.device - start.device,
        served_bytes,
        sum_ceiling,
        bound_s: seconds(end.bound_ns - start.bound_ns),
        barrier_s: seconds(end.barrier_ns - start.barrier_ns),
        barriers: end.barriers - start.barriers,
        time_s,
        fraction: served_bytes as f64 / sum_ceiling / time_s,
        share: served
            .iter()
            .map(|&bytes| part(bytes as f64, served_bytes as f64))
            .collect(),
        share_of_sum: rates.iter().map(|&rate| part(rate, sum_ceiling)).collect(),
        idle_s: end
            .idle_ns
            .iter()
            .zip(&start.idle_ns)
            .map(|(end, start)| seconds(end - start))
            .collect(),
        slowest_fetch_ms: slowest_fetch_ns.unwrap_or(0) as f64 / 1e6,
        latest_ms: latest_ns.unwrap_or(0) as f64 / 1e6,
        load,
    })
}
