//! The model, the drive, and sums at one moment.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use checkpoint::Checkpoint;
use engine::{Engine, Measure, NamedDrive, Options, Placement};
use paced_drive::{Control, Pace, PacedDrive};

use crate::Result;
use crate::mounts::{clean, warm};

/// Memory of the engine: about a sixth of the experts.
pub const MEMORY: u64 = 384 << 20;
/// Positions of a sequence: the longest prompt and a few tokens.
const POSITIONS: usize = 544;
/// Seed of the weights.
const SEED: u64 = 1;

/// The model, and copies of its shards for the drive to serve.
pub struct Rig {
    pub model: PathBuf,
    /// The engine drops the model's own files from the page cache, in which the paced drive must find its own.
    image: PathBuf,
    mount: PathBuf,
    /// Bytes a second.
    pub rate: f64,
}

/// An engine and, where it reads from one, its paced drive.
pub struct Running {
    pub engine: Engine,
    /// After the engine, whose files are open on it.
    drive: Option<PacedDrive>,
}

/// Sums at one moment.
pub struct Mark {
    at: Instant,
    passes: u64,
    barriers: u64,
    needed: u64,
    read: u64,
    device: u64,
    served: u64,
}

/// What happened between two moments.
#[derive(Clone, Copy)]
pub struct Between {
    pub time_s: f64,
    pub passes: u64,
    pub barriers: u64,
    pub needed: u64,
    pub read: u64,
    pub device: u64,
    /// By the drive's own count; 0 without one.
    pub served: u64,
}

impl Rig {
    /// Makes what is missing.
    pub fn prepare(scratch: &Path, config: &Path, rate: f64) -> Result<Self> {
        let model = scratch.join("model");
        if !model.join("config.json").exists() {
            println!("writing the model into {}", model.display());
            checkpoint::synthesize(&fs::read_to_string(config)?, SEED, &model, false, &mut |_| ())?;
        }
        let image = scratch.join("image");
        fs::create_dir_all(&image)?;
        for shard in Checkpoint::open(&model)?.shards() {
            let copy = image.join(shard.path.file_name().unwrap_or_default());
            if copy.metadata().map_or(0, |found| found.len()) != shard.len {
                fs::copy(&shard.path, copy)?;
            }
        }
        Ok(Self {
            model,
            image,
            mount: scratch.join("mount"),
            rate,
        })
    }

    /// Opens the model on the paced drive, or on the disk that it lies on.
    pub fn open(&self, paced: bool, pass_rows: usize, sequences: usize) -> Result<Running> {
        let mut placement = Placement::default();
        let mut drive = None;
        if paced {
            warm(&self.image)?;
            clean(&self.mount)?;
            let pace = Pace {
                rate: self.rate,
                ..Pace::default()
            };
            let mounted = PacedDrive::mount(&self.image, &self.mount, pace)?;
            placement = Placement {
                drives: vec![NamedDrive {
                    path: mounted.path().to_owned(),
                    note: String::new(),
                }],
                model_folder: false,
            };
            drive = Some(mounted);
        }
        let options = Options {
            memory: MEMORY,
            positions: POSITIONS,
            pass_rows,
            sequences,
            // What sharing a pass is worth, not what is kept between passes.
            cache: Some(0),
            placement,
            measure: Measure::Always,
            ..Options::default()
        };
        let engine = Engine::open(Checkpoint::open(&self.model)?, &options, &mut |_| ())?;
        let plan = engine.plan();
        if (plan.pass_rows, plan.sequences) != (pass_rows, sequences) {
            return Err(format!("memory holds less than the measurement needs:\n{plan}").into());
        }
        Ok(Running { engine, drive })
    }
}

impl Running {
    /// What paces the reads, if anything does.
    pub fn control(&self) -> Option<Control> {
        self.drive.as_ref().map(PacedDrive::control)
    }
}

impl Mark {
    pub fn set(engine: &Engine, control: Option<&Control>) -> Self {
        let stats = engine.stats();
        Self {
            at: Instant::now(),
            passes: stats.passes,
            barriers: engine.streamer().counters().barriers,
            needed: stats.expert_bytes_needed,
            read: stats.expert_bytes_read,
            device: stats.device_bytes,
            served: control.map_or(0, |control| control.status().bytes),
        }
    }

    /// From this moment to now.
    pub fn until_now(&self, engine: &Engine, control: Option<&Control>) -> Between {
        let now = Self::set(engine, control);
        Between {
            time_s: (now.at - self.at).as_secs_f64(),
            passes: now.passes - self.passes,
            barriers: now.barriers - self.barriers,
            needed: now.needed - self.needed,
            read: now.read - self.read,
            device: now.device - self.device,
            served: now.served - self.served,
        }
    }
}

/// The middle one.
pub fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
