//! A mount and its threads.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use fuser::{BackgroundSession, Config, MountOption, Session};

use crate::clock::Pace;
use crate::control::Control;
use crate::error::Error;
use crate::filesystem::PacedFiles;
use crate::priority::before_others;
use crate::queue::Queue;
use crate::source;

/// A mounted drive. Dropping it unmounts it.
#[derive(Debug)]
pub struct PacedDrive {
    at: PathBuf,
    queue: Arc<Queue>,
    /// `None` only while it is dropped.
    session: Option<BackgroundSession>,
    answers: Option<JoinHandle<()>>,
}

/// Whether this process may mount drives: `Err` says in words why not.
pub fn available() -> Result<(), String> {
    let opened = std::fs::File::options().read(true).write(true).open("/dev/fuse");
    opened.map(drop).map_err(|error| format!("/dev/fuse: {error}"))
}

impl PacedDrive {
    /// Serves `source`, a file or the files of a folder, at the folder `at`.
    ///
    /// # Errors
    ///
    /// [`Error::Source`], [`Error::Empty`], [`Error::NameTaken`], [`Error::Rate`], and [`Error::Mount`], also where
    /// threads cannot start.
    pub fn mount(source: &Path, at: &Path, pace: Pace) -> Result<Self, Error> {
        if !(pace.rate.is_finite() && pace.rate > 0.0) {
            return Err(Error::Rate { found: pace.rate });
        }
        let failed = |source| Error::Mount {
            path: at.to_owned(),
            source,
        };
        let queue = Queue::new(source::open(source)?, pace);
        let files = PacedFiles {
            queue: Arc::clone(&queue),
        };
        let mut config = Config::default();
        config.mount_options = vec![
            MountOption::FSName("paced-drive".into()),
            MountOption::Subtype("paced".into()),
        ];
        // The session's thread has the order of the thread that starts it.
        let started = std::thread::scope(|scope| {
            let start = || {
                before_others();
                Session::new(files, at, &config).and_then(Session::spawn)
            };
            scope.spawn(start).join()
        });
        let panicked = |_| Err(std::io::Error::other("a thread panicked"));
        let session = started.unwrap_or_else(panicked).map_err(failed)?;
        let answering = Arc::clone(&queue);
        let answers = std::thread::Builder::new()
            .name("answers".into())
            .spawn(move || {
                before_others();
                answering.answer();
            })
            .map_err(failed)?;
        Ok(Self {
            at: at.to_owned(),
            queue,
            session: Some(session),
            answers: Some(answers),
        })
    }

    /// The folder that it is mounted at.
    pub fn path(&self) -> &Path {
        &self.at
    }

    /// Commands and status, from any thread.
    pub fn control(&self) -> Control {
        Control {
            queue: Arc::clone(&self.queue),
        }
    }

    /// Waits until somebody unmounts it.
    ///
    /// # Errors
    ///
    /// [`Error::Session`].
    pub fn wait(mut self) -> Result<(), Error> {
        let Some(session) = self.session.take() else {
            return Ok(());
        };
        session.join().map_err(|source| Error::Session {
            path: self.at.clone(),
            source,
        })
    }
}

impl Drop for PacedDrive {
    fn drop(&mut self) {
        if let Some(session) = self.session.take() {
            // A mount that is in use is detached; what it says then helps nobody.
            let _ = session.umount_and_join();
        }
        self.queue.stop();
        if let Some(answers) = self.answers.take() {
            // A thread that panicked has told the user already.
            let _ = answers.join();
        }
    }
}
