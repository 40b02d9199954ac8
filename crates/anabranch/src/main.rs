//! The command line.
//!
//! A command goes through three rooms: `args` holds the flags as the user writes them, `settings` turns them once into
//! plain structs, and one file a command does the work (`run`, `inspect`, `place` and so on), each over the engine and
//! the checkpoint. Nothing below `settings` sees a flag or an environment variable.

mod answer;
mod args;
mod chat;
mod compare;
mod demo;
mod drives;
mod error;
mod events;
mod files;
mod ids;
mod inspect;
mod jobs;
mod logits;
mod model;
mod npy;
mod output;
mod place;
mod reads;
mod run;
mod session;
mod settings;
mod signals;
mod sizes;
mod synth;
mod trace;
mod verify;

use std::io::ErrorKind;
use std::process::ExitCode;

use clap::Parser;

use error::Error;
use settings::{Settings, Surroundings};
use signals::{EXIT_INTERRUPTED, Interrupt};

const EXIT_ERROR: u8 = 1;
const EXIT_USAGE: u8 = 2;
/// `jobs` is done, but some lines have an error.
const EXIT_LINE_ERRORS: u8 = 3;

fn main() -> ExitCode {
    let args = args::Args::parse();
    match Settings::new(args, &Surroundings::look()).and_then(|settings| obey(&settings)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => end(&error),
    }
}

fn obey(settings: &Settings) -> Result<(), Error> {
    let interrupt = Interrupt::listen()?;
    match settings {
        Settings::Run(run) => run::run(run, &interrupt),
        Settings::Jobs(jobs) => jobs::jobs(jobs, &interrupt),
        Settings::Inspect(inspect) => inspect::inspect(inspect, &interrupt),
        Settings::Logits(logits) => logits::logits(logits, &interrupt),
        Settings::Compare(compare) => compare::compare(compare, &interrupt),
        Settings::Drives(drives) => drives::drives(drives, &interrupt),
        Settings::Place(place) => place::place(place, &interrupt),
        Settings::Verify(verify) => verify::verify(verify, &interrupt),
        Settings::Synth(synth) => synth::synth(synth, &interrupt),
        Settings::Trace(trace) => trace::trace(trace, &interrupt),
    }
}

/// Says what went wrong, in one line, and gives the exit status.
fn end(error: &Error) -> ExitCode {
    match error {
        // Whoever reads has read enough.
        Error::Output(io) if io.kind() == ErrorKind::BrokenPipe => return ExitCode::SUCCESS,
        _ if error.is_interrupt() => return EXIT_INTERRUPTED.into(),
        _ => output::say(format_args!("error: {}", error.to_string().replace(['\n', '\r'], " "))),
    }
    match error {
        Error::Usage(_) => EXIT_USAGE.into(),
        Error::LineErrors { .. } => EXIT_LINE_ERRORS.into(),
        _ => EXIT_ERROR.into(),
    }
}
