//! `anabranch place`: packs on other drives, from a plan.

use std::ops::ControlFlow;
use std::time::Instant;

use checkpoint::Checkpoint;
use drives::Notices;
use engine::{PlaceOptions, PlacePlan, human};

use crate::error::Error;
use crate::output::{self, Meter};
use crate::settings::Place;
use crate::signals::Interrupt;

pub fn place(settings: &Place, interrupt: &Interrupt) -> Result<(), Error> {
    let _working = interrupt.working();
    let checkpoint = Checkpoint::open(&settings.model)?;
    let plan = PlacePlan::read(&settings.plan)?;
    let options = PlaceOptions {
        only_packs: settings.only_packs,
        ..PlaceOptions::default()
    };
    let notices = Notices::default();
    let start = Instant::now();
    let mut meter = Meter::new();
    let placed = engine::place(&checkpoint, &plan, &options, &notices, &mut |at| {
        meter.show(|| {
            // Every byte is written once and read back once.
            let left = output::time_left(start, at.written + at.verified, 2 * at.total);
            let (written, verified, total) = (human(at.written), human(at.verified), human(at.total));
            format!(
                "{}: wrote {written}, verified {verified} of {total}{left}",
                at.pack.display()
            )
        });
        match interrupt.cancel().is_cancelled() {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    });
    meter.clear();
    for notice in notices.take() {
        output::note(notice);
    }
    let placed = placed?;
    output::say(format_args!(
        "{} packs written and verified, {} of experts; {} were there already",
        placed.written.len(),
        human(placed.bytes),
        placed.kept.len()
    ));
    Ok(())
}
