//! `anabranch synth`: a random checkpoint in the published layout.

use std::path::Path;
use std::time::Instant;

use engine::human;

use crate::error::Error;
use crate::output::{self, Meter, grouped};
use crate::settings::Synth;
use crate::signals::Interrupt;

pub fn synth(settings: &Synth, interrupt: &Interrupt) -> Result<(), Error> {
    let _working = interrupt.working();
    let config = std::fs::read(&settings.config).map_err(|source| {
        Error::Checkpoint(checkpoint::Error::Io {
            path: settings.config.clone(),
            action: "read",
            source,
        })
    })?;
    let config = String::from_utf8_lossy(&config);
    let start = Instant::now();
    let mut meter = Meter::new();
    let made = checkpoint::synthesize(
        &config,
        settings.seed,
        &settings.out,
        settings.sparse,
        &mut |progress| {
            meter.show(|| {
                let left = output::time_left(start, progress.bytes, progress.total);
                let (done, of) = (human(progress.bytes), human(progress.total));
                format!("writing {}: {done} of {of}{left}", progress.file)
            });
            if interrupt.cancel().is_cancelled() {
                progress.stop();
            }
        },
    )
    .map_err(|error| with_path(error, &settings.config))?;
    meter.clear();
    output::say(format_args!(
        "{}: {} tensors in {} shards, {}{}",
        settings.out.display(),
        grouped(made.tensors),
        made.shards,
        human(made.file_bytes),
        if settings.sparse { ", the weights as holes" } else { "" },
    ));
    Ok(())
}

/// A configuration was passed on as text: its problems are those of this file.
fn with_path(mut error: checkpoint::Error, config: &Path) -> checkpoint::Error {
    if let checkpoint::Error::Config { path, .. } | checkpoint::Error::Json { path, .. } = &mut error {
        *path = config.to_owned();
    }
    error
}
