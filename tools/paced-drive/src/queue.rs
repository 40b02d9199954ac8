//! Reads that wait for their time, and the thread that answers them.

use std::collections::VecDeque;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fuser::{Errno, ReplyData};

use crate::clock::{DriveClock, Pace};
use crate::control::{Command, Status};
use crate::source::Served;

/// A read, and where its answer goes.
#[derive(Debug)]
struct Waiting {
    due_ns: u64,
    file: usize,
    offset: u64,
    len: usize,
    reply: ReplyData,
}

#[derive(Debug)]
struct State {
    clock: DriveClock,
    /// In the order of arrival, which is that of the answers.
    waiting: VecDeque<Waiting>,
    /// Answers that shall fail.
    to_fail: u64,
    present: bool,
    stopping: bool,
    reads: u64,
    bytes: u64,
    failed: u64,
    latest_ns: u64,
    slowest_fetch_ns: u64,
}

/// The reads of one drive.
#[derive(Debug)]
pub(crate) struct Queue {
    pub(crate) files: Vec<Served>,
    start: Instant,
    state: Mutex<State>,
    changed: Condvar,
}

impl Queue {
    pub(crate) fn new(files: Vec<Served>, pace: Pace) -> Arc<Self> {
        Arc::new(Self {
            files,
            start: Instant::now(),
            state: Mutex::new(State {
                clock: DriveClock::new(pace),
                waiting: VecDeque::new(),
                to_fail: 0,
                present: true,
                stopping: false,
                reads: 0,
                bytes: 0,
                failed: 0,
                latest_ns: 0,
                slowest_fetch_ns: 0,
            }),
            changed: Condvar::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now_ns(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }

    /// Takes a read of the file at a place in [`files`](Self::files). It is answered when its time has come.
    pub(crate) fn push(&self, file: usize, offset: u64, len: usize, reply: ReplyData) {
        let now_ns = self.now_ns();
        let left = self.files[file].len.saturating_sub(offset);
        let len = len.min(usize::try_from(left).unwrap_or(usize::MAX));
        let mut state = self.lock();
        if !state.present {
            state.failed += 1;
            drop(state);
            return reply.error(Errno::ENODEV);
        }
        let due_ns = state.clock.reserve(now_ns, len as u64);
        state.waiting.push_back(Waiting {
            due_ns,
            file,
            offset,
            len,
            reply,
        });
        drop(state);
        self.changed.notify_one();
    }

    pub(crate) fn is_present(&self) -> bool {
        self.lock().present
    }

    pub(crate) fn run(&self, command: Command) {
        let now_ns = self.now_ns();
        let mut state = self.lock();
        match command {
            Command::Rate(rate) => state.clock.pace.rate = rate,
            Command::Latency(latency_ns) => state.clock.pace.latency_ns = latency_ns,
            Command::Fail(count) => state.to_fail = count,
            Command::Stall(for_ns) => {
                state.clock.stall(now_ns, for_ns);
                for read in &mut state.waiting {
                    read.due_ns += for_ns;
                }
            }
            Command::Vanish => state.present = false,
            Command::Return => state.present = true,
        }
        drop(state);
        self.changed.notify_one();
    }

    pub(crate) fn status(&self) -> Status {
        let state = self.lock();
        Status {
            rate: state.clock.pace.rate,
            latency_ns: state.clock.pace.latency_ns,
            present: state.present,
            reads: state.reads,
            bytes: state.bytes,
            failed: state.failed,
            waiting: state.waiting.len(),
            latest_ns: state.latest_ns,
            slowest_fetch_ns: state.slowest_fetch_ns,
        }
    }

    /// Ends [`answer`](Self::answer).
    pub(crate) fn stop(&self) {
        self.lock().stopping = true;
        self.changed.notify_one();
    }

    /// Answers reads as their times come, until it is stopped. Data is fetched while its time has not come yet.
    pub(crate) fn answer(&self) {
        let mut data = Vec::new();
        while let Some((file, offset, len)) = self.first() {
            data.resize(len, 0);
            let start = Instant::now();
            let fetched = self.files[file].file.read_exact_at(&mut data, offset);
            let (read, error) = self.take_first(fetched, start.elapsed());
            match (read, error) {
                (None, _) => {}
                (Some(read), None) => read.reply.data(&data),
                (Some(read), Some(error)) => read.reply.error(error),
            }
        }
    }

    /// Waits for a read; gives the place, offset and length of the first. `None` when the queue is stopped.
    fn first(&self) -> Option<(usize, u64, usize)> {
        let mut state = self.lock();
        loop {
            if let Some(read) = state.waiting.front() {
                return Some((read.file, read.offset, read.len));
            }
            if state.stopping {
                return None;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Waits until the first read is due, or nothing is worth waiting for; takes it, and books how it ends.
    fn take_first(&self, fetched: io::Result<()>, took: Duration) -> (Option<Waiting>, Option<Errno>) {
        let mut state = self.lock();
        state.slowest_fetch_ns = state.slowest_fetch_ns.max(took.as_nanos() as u64);
        let late_ns = loop {
            let now_ns = self.now_ns();
            let due_ns = state.waiting.front().map_or(0, |read| read.due_ns);
            if now_ns >= due_ns || !state.present || state.stopping {
                break now_ns.saturating_sub(due_ns);
            }
            let left = Duration::from_nanos(due_ns - now_ns);
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        };
        let read = state.waiting.pop_front();
        let fails = state.to_fail > 0;
        let error = match (state.present, fails, fetched) {
            (false, _, _) => Some(Errno::ENODEV),
            (true, true, _) => Some(Errno::EIO),
            (true, false, Err(error)) => Some(Errno::from(error)),
            (true, false, Ok(())) => None,
        };
        state.to_fail -= u64::from(fails && state.present);
        match (&read, error) {
            (Some(read), None) => {
                state.reads += 1;
                state.bytes += read.len as u64;
                state.latest_ns = state.latest_ns.max(late_ns);
            }
            _ => state.failed += 1,
        }
        (read, error)
    }
}
