//! The file of `--events`: read events, written while the model runs.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::Duration;

use drives::EventFeed;
use engine::{Engine, TrunkFormat};
use instruments::ReadRecord;

use crate::error::Error;
use crate::output;

/// Between two looks for new events. At 14 GB/s in pieces of 512 KiB that is 1,400 events, a tenth of what is kept.
const PAUSE: Duration = Duration::from_millis(50);

/// A file that is being written.
pub struct EventLog {
    path: PathBuf,
    /// Dropped to end the writing.
    stop: Sender<()>,
    writer: JoinHandle<io::Result<Written>>,
}

/// What went into the file.
#[derive(Default)]
struct Written {
    events: u64,
    /// Events that were overwritten before they were seen.
    lost: u64,
}

impl EventLog {
    /// Begins to write the engine's events from now on.
    pub fn start(path: &Path, engine: &Engine) -> Result<Self, Error> {
        let failed = |error| Error::file(path, "write", error);
        let file = File::create(path).map_err(failed)?;
        let names = engine
            .streamer()
            .layout()
            .drives()
            .iter()
            .map(drives::Drive::name)
            .collect();
        let (feed, trunk) = (engine.streamer().event_feed(), engine.trunk());
        let (stop, stopped) = mpsc::channel();
        let write = move || {
            let mut log = Log {
                out: BufWriter::new(file),
                feed,
                names,
                trunk,
                next: 0,
                written: Written::default(),
            };
            while stopped.recv_timeout(PAUSE) == Err(RecvTimeoutError::Timeout) {
                log.write()?;
            }
            log.write()?;
            log.out.flush()?;
            Ok(log.written)
        };
        let writer = std::thread::Builder::new()
            .name("events".into())
            .spawn(write)
            .map_err(failed)?;
        Ok(Self {
            path: path.to_owned(),
            stop,
            writer,
        })
    }

    /// Writes what is left.
    pub fn finish(self) -> Result<(), Error> {
        drop(self.stop);
        let ended = self
            .writer
            .join()
            .unwrap_or_else(|_| Err(io::Error::other("the writing thread panicked")));
        let written = ended.map_err(|error| Error::file(&self.path, "write", error))?;
        if written.lost > 0 {
            output::note(format_args!(
                "{}: {} events were overwritten before they could be written, {} are there",
                self.path.display(),
                output::grouped(written.lost),
                output::grouped(written.events)
            ));
        }
        Ok(())
    }
}

/// The writing thread's state.
struct Log {
    out: BufWriter<File>,
    feed: EventFeed,
    names: Vec<String>,
    trunk: TrunkFormat,
    /// Number of the next event.
    next: u64,
    written: Written,
}

impl Log {
    fn write(&mut self) -> io::Result<()> {
        let batch = self.feed.since(self.next);
        self.written.lost += batch.first - self.next;
        for event in &batch.events {
            let record = ReadRecord::new(event, &self.names[event.drive.index()], self.trunk);
            serde_json::to_writer(&mut self.out, &record)?;
            self.out.write_all(b"\n")?;
        }
        self.written.events += batch.events.len() as u64;
        self.next = batch.next();
        Ok(())
    }
}
