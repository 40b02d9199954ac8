//! `anabranch logits`: what the model thinks of the next token, as numbers.

use checkpoint::Checkpoint;
use engine::PassRows;

use crate::error::Error;
use crate::model::{self, Needs};
use crate::npy::{self, NpyWriter};
use crate::output::Meter;
use crate::settings::Logits;
use crate::signals::Interrupt;

pub fn logits(settings: &Logits, interrupt: &Interrupt) -> Result<(), Error> {
    let _working = interrupt.working();
    // Before hours of work, not after.
    npy::check_target(&settings.out)?;
    let checkpoint = Checkpoint::open(&model::folder(&settings.model)?)?;
    model::check_ids(&checkpoint, &settings.ids)?;
    let ids = &settings.ids;
    let needs = Needs {
        positions: ids.len(),
        pass_rows: ids.len(),
        sequences: 1,
        all_logits: settings.all,
    };
    let mut engine = model::load(checkpoint, &settings.experts, &settings.machine, &needs, interrupt)?;
    let vocab = engine.config().vocab_size;
    let shape = match settings.all {
        true => vec![ids.len(), vocab],
        false => vec![vocab],
    };
    let mut file = NpyWriter::create(&settings.out, &shape)?;
    let mut sequence = engine.new_sequence();
    let mut meter = Meter::new();
    let rows = engine.plan().pass_rows;
    for (number, part) in ids.chunks(rows).enumerate() {
        let done = number * rows;
        meter.show(|| format!("{done} of {} tokens", ids.len()));
        let last = done + part.len() == ids.len();
        let wanted: Vec<usize> = match (settings.all, last) {
            (true, _) => (0..part.len()).collect(),
            (false, true) => vec![part.len() - 1],
            (false, false) => vec![],
        };
        let pass = &mut [PassRows {
            sequence: &mut sequence,
            ids: part,
        }];
        file.write(&engine.pass(pass, &wanted, interrupt.cancel(), None)?)?;
    }
    meter.clear();
    model::pass_notices_on(&engine);
    file.finish()
}
