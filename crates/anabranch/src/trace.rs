//! `anabranch trace`: what a model does inside.

mod export;
mod routing;
pub mod texts;

use crate::error::Error;
use crate::settings::Trace;
use crate::signals::Interrupt;

pub fn trace(settings: &Trace, interrupt: &Interrupt) -> Result<(), Error> {
    match settings {
        Trace::Export(export) => export::export(export),
        Trace::Routing(routing) => routing::routing(routing, interrupt),
    }
}
