//! From settings to a model that is ready to run.

use std::path::PathBuf;
use std::time::Instant;

use checkpoint::Checkpoint;
use engine::{Engine, Measure, Options, Placement, human};

use crate::demo;
use crate::error::Error;
use crate::output::{self, Meter};
use crate::settings::{Experts, Machine, Model};
use crate::signals::Interrupt;

/// The folder of the chosen model.
pub fn folder(model: &Model) -> Result<PathBuf, Error> {
    match model {
        Model::Folder(dir) => Ok(dir.clone()),
        Model::Demo(cache) => demo::folder(cache.as_deref()),
    }
}

/// Sees that every id is in the vocabulary, before anything large is loaded.
pub fn check_ids(checkpoint: &Checkpoint, ids: &[u32]) -> Result<(), Error> {
    let last = checkpoint.config().vocab_size as u32 - 1;
    match ids.iter().find(|&&id| id > last) {
        Some(&found) => Err(engine::Error::TokenId { found, last }.into()),
        None => Ok(()),
    }
}

/// What one use of the model needs.
pub struct Needs {
    /// Tokens that the sequence may reach.
    pub positions: usize,
    /// Rows of the largest useful pass.
    pub pass_rows: usize,
    /// Sequences that are useful at one time.
    pub sequences: usize,
    /// Whether the logits of all rows are wanted.
    pub all_logits: bool,
}

/// Loads the resident weights, with progress on the terminal, and passes notices on.
pub fn load(
    checkpoint: Checkpoint,
    experts: &Experts,
    machine: &Machine,
    needs: &Needs,
    interrupt: &Interrupt,
) -> Result<Engine, Error> {
    let placement = match experts {
        Experts::Folders(folders) => Placement::of(folders.iter().cloned()),
        Experts::Layout(file) => Placement::read(file)?,
    };
    let usual = Options::default();
    let options = Options {
        memory: machine.memory.unwrap_or(usual.memory),
        cache: machine.cache,
        threads: machine.threads.unwrap_or(usual.threads),
        isa: machine.isa.unwrap_or(usual.isa),
        reader: machine.reader,
        mla_eps: machine.mla_eps,
        kv: machine.kv,
        positions: needs.positions,
        pass_rows: needs.pass_rows,
        sequences: needs.sequences,
        all_logits: needs.all_logits,
        placement,
        measure: machine.profiles.clone().map_or(Measure::Never, Measure::Remember),
        cancel: interrupt.cancel().clone(),
        ..usual
    };
    let start = Instant::now();
    let mut meter = Meter::new();
    let engine = Engine::open(checkpoint, &options, &mut |done, of| {
        meter.show(|| {
            let left = output::time_left(start, done, of);
            format!("loading {} of {}{left}", human(done), human(of))
        });
    })?;
    meter.clear();
    pass_notices_on(&engine);
    Ok(engine)
}

/// Shows the engine's notices.
pub fn pass_notices_on(engine: &Engine) {
    for notice in engine.notices() {
        output::note(notice);
    }
}
