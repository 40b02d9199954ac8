//! From settings to a model that is ready to run.

use std::path::PathBuf;
use std::time::Instant;

use checkpoint::Checkpoint;
use engine::{Engine, LoadPhase, LoadProgress, Measure, Options, Placement, TrunkFormat, human};

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
        trunk: machine.trunk.clone(),
        positions: needs.positions,
        pass_rows: needs.pass_rows,
        sequences: needs.sequences,
        all_logits: needs.all_logits,
        placement,
        measure: machine.profiles.clone().map_or(Measure::Never, Measure::Remember),
        cancel: interrupt.cancel().clone(),
        ..usual
    };
    let mut meter = LoadMeter::new();
    let engine = Engine::open(checkpoint, &options, &mut |at| meter.show(at))?;
    drop(meter);
    pass_notices_on(&engine);
    note_inexact(engine.trunk());
    Ok(engine)
}

/// Says what results are not.
fn note_inexact(trunk: TrunkFormat) {
    if !trunk.is_exact() {
        output::note(format_args!(
            "trunk {}: results are not those of the published weights (`anabranch compare` measures by how much)",
            trunk.label()
        ));
    }
}

/// How far loading is, on the terminal; the phases that happen once are told where there is none, too.
struct LoadMeter {
    meter: Meter,
    phase: Option<LoadPhase>,
    start: Instant,
}

impl LoadMeter {
    fn new() -> Self {
        Self {
            meter: Meter::new(),
            phase: None,
            start: Instant::now(),
        }
    }

    fn show(&mut self, LoadProgress { phase, done, of }: LoadProgress) {
        if self.phase != Some(phase) {
            self.meter.clear();
            (self.phase, self.start) = (Some(phase), Instant::now());
            match phase {
                LoadPhase::Wait => output::note("another process converts the trunk to int8; this one waits for it"),
                LoadPhase::Convert => output::note(format_args!(
                    "the trunk is converted to int8, once for this model: {} to read",
                    human(of)
                )),
                LoadPhase::Load => {}
            }
        }
        let start = self.start;
        self.meter.show(|| {
            let left = output::time_left(start, done, of);
            match phase {
                LoadPhase::Wait => "waiting".to_owned(),
                LoadPhase::Convert => format!("converting {} of {}{left}", human(done), human(of)),
                LoadPhase::Load => format!("loading {} of {}{left}", human(done), human(of)),
            }
        });
    }
}

/// Shows the engine's notices.
pub fn pass_notices_on(engine: &Engine) {
    for notice in engine.notices() {
        output::note(notice);
    }
}
