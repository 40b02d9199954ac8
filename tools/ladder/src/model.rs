//! The model and its packs: made once, kept in the scratch folder.

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use checkpoint::Checkpoint;
use drives::Notices;
use engine::{Engine, ExpertSet, Options, Part, PlaceOptions, PlacePlan, PlanLine, greedy, place};

use crate::Result;
use crate::rungs::{RATES, WEIGHTED};

/// The prompt of every run.
pub const PROMPT: [u32; 4] = [3, 1, 4, 1];

/// Tokens after which the experts are ranked by use. More than a run has, and from the same prompt.
const RANKED_TOKENS: usize = 64;

/// Seed of the weights.
const SEED: u64 = 1;

/// The model's own folder, and folders that paced drives serve.
pub struct Model {
    /// The model: what is not an expert is read from here.
    pub dir: PathBuf,
    /// Copies of its shards. The engine drops the model's own files from the page cache, in which paced drives must find theirs.
    pub image: PathBuf,
    /// Packs of the usage-weighted layout, for each drive but the first, which has the shards.
    pub weighted: Vec<PathBuf>,
    /// Packs of the split layout, for each drive.
    pub split: Vec<PathBuf>,
}

/// Makes what is missing.
pub fn prepare(scratch: &Path, config: &Path) -> Result<Model> {
    let dir = scratch.join("model");
    if !dir.join("config.json").exists() {
        println!("writing the model into {}", dir.display());
        checkpoint::synthesize(&fs::read_to_string(config)?, SEED, &dir, false, &mut |_| ())?;
    }
    let folder = |kind: &str, number: usize| scratch.join(format!("{kind}-{number}"));
    let model = Model {
        weighted: (1..RATES.len()).map(|drive| folder("weighted", drive)).collect(),
        split: (0..RATES.len()).map(|drive| folder("split", drive)).collect(),
        image: scratch.join("image"),
        dir,
    };
    let checkpoint = Checkpoint::open(&model.dir)?;
    for path in model.weighted.iter().chain(&model.split).chain([&model.image]) {
        fs::create_dir_all(path)?;
    }
    for shard in checkpoint.shards() {
        let copy = model.image.join(shard.path.file_name().unwrap_or_default());
        if copy.metadata().map_or(0, |found| found.len()) != shard.len {
            fs::copy(&shard.path, copy)?;
        }
    }
    let speeds: Vec<(PathBuf, f64)> = model.split.iter().cloned().zip(RATES).collect();
    write(&checkpoint, &PlacePlan::split(&checkpoint, &speeds))?;
    place_weighted(&checkpoint, &model, scratch)?;
    Ok(model)
}

/// Drives hold the most used experts, the slower a drive the fewer. What several drives hold is one file with several names, so that the
/// layout takes little more than one copy of the model.
fn place_weighted(checkpoint: &Checkpoint, model: &Model, scratch: &Path) -> Result<()> {
    if model.weighted.iter().all(|folder| folder.join("complete").exists()) {
        return Ok(());
    }
    let ranks = rank(&model.dir)?;
    // Shares ascend from the last drive to the second: the part from one share to the next is on all drives before.
    let mut from = 0.0;
    for drive in (1..RATES.len()).rev() {
        let part = scratch.join(format!("part-{drive}"));
        fs::create_dir_all(&part)?;
        let to = WEIGHTED[drive];
        let line = |(layer, order): &(u32, Vec<u32>)| {
            let place = |share: f64| (share * order.len() as f64).round() as usize;
            PlanLine {
                drive: part.clone(),
                layer: *layer,
                experts: ExpertSet::of(&order[place(from)..place(to)]),
                part: Part::Whole,
            }
        };
        let plan = PlacePlan {
            lines: ranks.iter().map(line).collect(),
        };
        write(checkpoint, &plan)?;
        for pack in part.read_dir()? {
            let pack = pack?;
            for folder in &model.weighted[..drive] {
                fs::hard_link(pack.path(), folder.join(pack.file_name()))?;
            }
        }
        fs::remove_dir_all(&part)?;
        from = to;
    }
    for folder in &model.weighted {
        fs::write(folder.join("complete"), "")?;
    }
    Ok(())
}

fn write(checkpoint: &Checkpoint, plan: &PlacePlan) -> Result<()> {
    let options = PlaceOptions::default();
    let report = place(checkpoint, plan, &options, &Notices::default(), &mut |_| {
        ControlFlow::Continue(())
    })?;
    if report.bytes > 0 {
        println!(
            "wrote {} packs, {} bytes of experts",
            report.written.len(),
            report.bytes
        );
    }
    Ok(())
}

/// For each layer its experts, the most used first.
fn rank(dir: &Path) -> Result<Vec<(u32, Vec<u32>)>> {
    println!("ranking experts by their use in {RANKED_TOKENS} tokens");
    let mut engine = Engine::open(Checkpoint::open(dir)?, &Options::default(), &mut |_| ())?;
    let experts = engine.config().num_experts;
    let mut uses = std::collections::BTreeMap::new();
    let mut sequence = engine.new_sequence();
    let mut ids = PROMPT.to_vec();
    for _ in 0..RANKED_TOKENS {
        let mut count = |layer: usize, _: &[f32], routes: Option<&engine::Routes>| {
            let uses = routes.map(|routes| (routes, uses.entry(layer as u32).or_insert_with(|| vec![0u64; experts])));
            if let Some((routes, uses)) = uses {
                routes.experts.iter().for_each(|&expert| uses[expert as usize] += 1);
            }
        };
        let part = &mut [engine::PassRows {
            sequence: &mut sequence,
            ids: &ids,
        }];
        let logits = engine.pass(part, &[ids.len() - 1], &engine::Cancel::default(), Some(&mut count))?;
        ids = vec![greedy(&logits)];
    }
    let order = |(layer, uses): (u32, Vec<u64>)| {
        let mut order: Vec<u32> = (0..uses.len() as u32).collect();
        order.sort_by_key(|&expert| std::cmp::Reverse(uses[expert as usize]));
        (layer, order)
    };
    Ok(uses.into_iter().map(order).collect())
}
