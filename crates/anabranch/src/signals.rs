//! Ctrl-C, SIGTERM and SIGHUP.

use std::io::{IsTerminal, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use engine::Cancel;

use crate::error::Error;

/// Exit status after Ctrl-C: 128 and the number of SIGINT, as shells have it.
pub const EXIT_INTERRUPTED: u8 = 130;

/// What a signal does: while work is under way the first asks it to stop; otherwise, and the second time, it ends the
/// program at once.
#[derive(Clone, Default)]
pub struct Interrupt {
    cancel: Cancel,
    working: Arc<AtomicBool>,
}

impl Interrupt {
    /// Begins to listen; once a process.
    pub fn listen() -> Result<Self, Error> {
        let interrupt = Interrupt::default();
        let handler = interrupt.clone();
        ctrlc::set_handler(move || handler.signalled())?;
        Ok(interrupt)
    }

    /// Says that work is under way that notices [`Interrupt::cancel`], until the guard is dropped.
    pub fn working(&self) -> Working<'_> {
        self.cancel.reset();
        self.working.store(true, Ordering::SeqCst);
        Working(self)
    }

    /// The request to stop.
    pub fn cancel(&self) -> &Cancel {
        &self.cancel
    }

    fn signalled(&self) {
        if self.working.load(Ordering::SeqCst) && !self.cancel.is_cancelled() {
            return self.cancel.cancel();
        }
        let mut stderr = std::io::stderr();
        if stderr.is_terminal() {
            let _ = writeln!(stderr);
        }
        std::process::exit(EXIT_INTERRUPTED.into());
    }
}

/// Work under way.
pub struct Working<'a>(&'a Interrupt);

impl Drop for Working<'_> {
    fn drop(&mut self) {
        self.0.working.store(false, Ordering::SeqCst);
    }
}
