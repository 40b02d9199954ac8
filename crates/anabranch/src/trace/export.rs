//! `anabranch trace export`: read events for a trace viewer.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, BufWriter, Error as IoError, ErrorKind, Write};
use std::path::{Path, PathBuf};

use instruments::write_chrome_trace;

use crate::error::Error;
use crate::output::{self, grouped};
use crate::settings::Export;

pub fn export(settings: &Export) -> Result<(), Error> {
    let events = &settings.events;
    let file = File::open(events).map_err(|source| Error::EventsFile {
        path: events.clone(),
        source,
    })?;
    let records = BufReader::new(file).lines().enumerate().map(|(number, line)| {
        serde_json::from_str(&line?).map_err(|error| {
            let text = format!("line {}: {error}", number + 1);
            IoError::new(ErrorKind::InvalidData, text)
        })
    });
    let out = settings.out.clone().unwrap_or_else(|| beside(events));
    let mut partial = out.clone().into_os_string();
    partial.push(".partial");
    let partial = PathBuf::from(partial);
    let failed = |error| Error::file(&partial, "write", error);
    let mut writer = BufWriter::new(File::create(&partial).map_err(failed)?);
    let written = write_chrome_trace(records, &mut writer).and_then(|reads| writer.flush().map(|()| reads));
    let reads = written.map_err(|error| {
        // What is there of it is of no use, whether it goes or not.
        let _ = fs::remove_file(&partial);
        match error.kind() {
            ErrorKind::InvalidData => Error::EventsFile {
                path: events.clone(),
                source: error,
            },
            _ => failed(error),
        }
    })?;
    fs::rename(&partial, &out).map_err(|error| Error::file(&out, "write", error))?;
    output::say(format_args!(
        "{}: {} reads; open it at https://ui.perfetto.dev",
        out.display(),
        grouped(reads)
    ));
    Ok(())
}

/// The usual name of the trace: that of the events with another end.
fn beside(events: &Path) -> PathBuf {
    events.with_extension("trace.json")
}
