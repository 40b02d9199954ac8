//! `anabranch compare`: how far settings that are not exact move logits, routes and loss.

use std::time::Instant;

use checkpoint::Checkpoint;
use engine::{Cancel, Engine, PassRows, human};
use instruments::{LogitsTally, RouteLog};

use crate::error::Error;
use crate::model::{self, Needs};
use crate::output::{self, Meter};
use crate::settings::{Compare, Machine};
use crate::signals::Interrupt;
use crate::trace::texts;

mod report;
mod scratch;

use report::{Report, Side};
use scratch::Scratch;

pub fn compare(settings: &Compare, interrupt: &Interrupt) -> Result<(), Error> {
    let _working = interrupt.working();
    let dir = model::folder(&settings.model)?;
    let (checkpoint, texts) = texts::with_model(&dir, &settings.texts)?;
    let tokens: usize = texts.iter().map(Vec::len).sum();
    let vocab = checkpoint.config().vocab_size;
    let mut scratch = Scratch::create(&settings.scratch, (tokens * vocab * size_of::<f32>()) as u64)?;
    // One after the other: memory may hold one trunk, not two.
    let mut keep = |_: Option<u32>, logits: &[f32]| scratch.write(logits);
    let (one, routes) = follow(checkpoint, settings, &settings.exact, &texts, interrupt, &mut keep)?;
    let mut before = vec![0.0; vocab];
    let mut logits_tally = LogitsTally::default();
    scratch.rewind()?;
    let mut tally = |next: Option<u32>, logits: &[f32]| {
        scratch.read(&mut before)?;
        logits_tally.add(&before, logits, next);
        Ok(())
    };
    let (other, other_routes) = follow(
        Checkpoint::open(&dir)?,
        settings,
        &settings.machine,
        &texts,
        interrupt,
        &mut tally,
    )?;
    let report = Report {
        texts: texts.len(),
        sides: [one, other],
        logits: logits_tally,
        routes: routes.compare(&other_routes),
    };
    output::print(&match settings.json {
        true => format!("{:#}\n", report.json()),
        false => report.text(),
    })
}

/// Takes the logits after a token, with the token that follows.
type Take<'a> = &'a mut dyn FnMut(Option<u32>, &[f32]) -> Result<(), Error>;

/// Feeds all texts to the model with these settings, token by token as they are, whatever it would have chosen.
fn follow(
    checkpoint: Checkpoint,
    settings: &Compare,
    machine: &Machine,
    texts: &[Vec<u32>],
    interrupt: &Interrupt,
    take: Take<'_>,
) -> Result<(Side, RouteLog), Error> {
    let longest = texts.iter().map(Vec::len).max().unwrap_or(0);
    let needs = Needs {
        positions: longest,
        pass_rows: longest,
        sequences: 1,
        all_logits: true,
    };
    let mut engine = model::load(checkpoint, &settings.experts, machine, &needs, interrupt)?;
    let side = Side {
        trunk: engine.trunk(),
        kv: engine.plan().kv,
        trunk_bytes: engine.plan().trunk,
    };
    let mut routes = RouteLog::default();
    let (start, mut meter) = (Instant::now(), Meter::new());
    let of: usize = texts.iter().map(Vec::len).sum();
    let mut done = 0;
    for ids in texts {
        one_text(&mut engine, ids, &mut routes, interrupt.cancel(), take, &mut |rows| {
            done += rows;
            meter.show(|| {
                let left = output::time_left(start, done as u64, of as u64);
                format!("trunk {}: {done} of {of} tokens{left}", side.trunk)
            });
        })?;
    }
    meter.clear();
    model::pass_notices_on(&engine);
    Ok((side, routes))
}

fn one_text(
    engine: &mut Engine,
    ids: &[u32],
    routes: &mut RouteLog,
    cancel: &Cancel,
    take: Take<'_>,
    progress: &mut dyn FnMut(usize),
) -> Result<(), Error> {
    let (rows, vocab) = (engine.plan().pass_rows, engine.config().vocab_size);
    let mut sequence = engine.new_sequence();
    let mut seen = 0;
    for part in ids.chunks(rows) {
        let all: Vec<usize> = (0..part.len()).collect();
        let pass = &mut [PassRows {
            sequence: &mut sequence,
            ids: part,
        }];
        let logits = engine.pass(pass, &all, cancel, Some(&mut *routes))?;
        for row in logits.chunks_exact(vocab) {
            seen += 1;
            take(ids.get(seen).copied(), row)?;
        }
        progress(part.len());
    }
    Ok(())
}

/// What a scratch file of `bytes` bytes is for, where there is no room for it.
fn wanted(bytes: u64) -> String {
    format!("at least {bytes} ({}) for the first side's logits", human(bytes))
}
