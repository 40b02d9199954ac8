//! Choosing a back end.

use std::fmt;
use std::sync::Arc;

use crate::arena::Arena;
use crate::backend::Backend;
use crate::clock::Clock;
use crate::error::Result;
use crate::layout::Layout;
use crate::notice::Notices;
use crate::threads::ThreadBackend;

/// How files are read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Reader {
    /// The best way that the system allows.
    #[default]
    Best,
    /// Positional reads on threads, which every Unix has.
    Threads,
}

impl Reader {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Best, Self::Threads];

    /// Its name, as on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Best => "best",
            Self::Threads => "threads",
        }
    }

    /// Opens the layout's files, as [`open_best`] does, or with threads.
    ///
    /// # Errors
    ///
    /// Those of [`open_best`].
    pub fn open(
        self,
        layout: &Layout,
        arena: &Arc<Arena>,
        depths: &[usize],
        clock: Arc<dyn Clock>,
        notices: &Notices,
    ) -> Result<Box<dyn Backend>> {
        match self {
            Self::Best => open_best(layout, arena, depths, clock, notices),
            Self::Threads => Ok(Box::new(ThreadBackend::with_depths(layout, depths, clock, notices)?)),
        }
    }
}

impl fmt::Display for Reader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Opens the layout's files with the best back end that the system allows: io_uring on Linux, threads where it is refused, which
/// adds a notice, and on other systems.
///
/// `depths` holds the reads in flight for each drive, in the layout's order ([`Profile::depths`](crate::Profile::depths) has
/// measured ones); [`DEFAULT_DEPTH`](crate::DEFAULT_DEPTH) serves drives beyond it. `arena` is the memory that will be read into.
///
/// # Errors
///
/// [`Error::Open`](crate::Error::Open) when a file cannot be opened, [`Error::Thread`](crate::Error::Thread) when a thread cannot
/// start.
pub fn open_best(
    layout: &Layout,
    arena: &Arc<Arena>,
    depths: &[usize],
    clock: Arc<dyn Clock>,
    notices: &Notices,
) -> Result<Box<dyn Backend>> {
    #[cfg(target_os = "linux")]
    match crate::uring::UringBackend::open(layout, arena, depths, Arc::clone(&clock), notices) {
        Ok(backend) => return Ok(Box::new(backend)),
        Err(crate::Error::Uring { reason }) => notices.add(crate::Notice::Threads { reason }),
        Err(error) => return Err(error),
    }
    #[cfg(not(target_os = "linux"))]
    let _ = arena;
    Ok(Box::new(ThreadBackend::with_depths(layout, depths, clock, notices)?))
}
