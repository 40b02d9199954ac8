//! Positional reads on a few threads per drive: works on any Unix.

use std::collections::VecDeque;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::task::{Wake, Waker};
use std::thread::JoinHandle;

use crate::backend::{Backend, Completion, ReadRequest};
use crate::clock::Clock;
use crate::error::{Error, Result};
use crate::file::DirectFile;
use crate::layout::{DriveId, Layout};
use crate::notice::Notices;

/// Reads in flight per drive. Two keep a device busy while the next read is decided; four also cover a late thread.
pub const DEFAULT_DEPTH: usize = 4;

/// Reads with `pread`, each on a thread of the drive that it reads from, so that a slow drive delays no other.
pub struct ThreadBackend {
    depths: Vec<usize>,
    queues: Vec<Arc<Queue>>,
    threads: Vec<JoinHandle<()>>,
    messages: Receiver<Message>,
    waker: Waker,
}

enum Message {
    Done(Completion),
    Woken,
}

struct MessageWaker(Sender<Message>);

impl Wake for MessageWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // The receiver is gone when the back end is: then nobody waits.
        let _ = self.0.send(Message::Woken);
    }
}

impl ThreadBackend {
    /// Opens the layout's files and starts `depth` threads for each drive (at least 1; [`DEFAULT_DEPTH`] serves most).
    ///
    /// # Errors
    ///
    /// [`Error::Open`] when a file cannot be opened, [`Error::Thread`] when a thread cannot start.
    pub fn open(layout: &Layout, depth: usize, clock: Arc<dyn Clock>, notices: &Notices) -> Result<Self> {
        Self::with_depths(layout, &vec![depth; layout.drives().len()], clock, notices)
    }

    /// The same with a depth for each drive, in the layout's order; [`DEFAULT_DEPTH`] for drives beyond `depths`.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open).
    pub fn with_depths(layout: &Layout, depths: &[usize], clock: Arc<dyn Clock>, notices: &Notices) -> Result<Self> {
        let depths = depth_of_each(layout, depths);
        let files = layout
            .files()
            .iter()
            .map(|file| DirectFile::open(&file.path, notices))
            .collect::<Result<Vec<_>>>()?;
        let files = Arc::new(files);
        let (sender, messages) = mpsc::channel();
        let mut backend = Self {
            depths,
            queues: Vec::new(),
            threads: Vec::new(),
            messages,
            waker: Arc::new(MessageWaker(sender.clone())).into(),
        };
        for drive in 0..layout.drives().len() {
            let queue = Arc::new(Queue::default());
            backend.queues.push(Arc::clone(&queue));
            for thread in 0..backend.depths[drive] {
                let (queue, files) = (Arc::clone(&queue), Arc::clone(&files));
                let (clock, sender) = (Arc::clone(&clock), sender.clone());
                let started = std::thread::Builder::new()
                    .name(format!("read-{drive}.{thread}"))
                    .spawn(move || serve(&queue, &files, &*clock, &sender))
                    .map_err(|error| Error::Thread {
                        reason: error.to_string(),
                    })?;
                backend.threads.push(started);
            }
        }
        Ok(backend)
    }

    fn take(message: Message, done: &mut Vec<Completion>) {
        if let Message::Done(completion) = message {
            done.push(completion);
        }
    }
}

impl Backend for ThreadBackend {
    fn depth(&self, drive: DriveId) -> usize {
        self.depths[drive.index()]
    }

    fn submit(&mut self, read: ReadRequest) {
        self.queues[read.drive.index()].push(read);
    }

    fn wait(&mut self, done: &mut Vec<Completion>) {
        // The waker holds a sender, so the channel is never closed here.
        if let Ok(message) = self.messages.recv() {
            Self::take(message, done);
        }
        while let Ok(message) = self.messages.try_recv() {
            Self::take(message, done);
        }
    }

    fn waker(&self) -> Waker {
        self.waker.clone()
    }

    fn describe(&self) -> String {
        format!("positional reads on {} threads", self.threads.len())
    }
}

/// A depth of at least 1 for each drive.
pub(crate) fn depth_of_each(layout: &Layout, depths: &[usize]) -> Vec<usize> {
    let of = |drive| depths.get(drive).copied().unwrap_or(DEFAULT_DEPTH).max(1);
    (0..layout.drives().len()).map(of).collect()
}

impl Drop for ThreadBackend {
    fn drop(&mut self) {
        for queue in &self.queues {
            queue.close();
        }
        for thread in self.threads.drain(..) {
            // A thread that panicked has told the user already.
            let _ = thread.join();
        }
    }
}

/// Reads of one drive that no thread has taken yet.
#[derive(Default)]
struct Queue {
    state: Mutex<QueueState>,
    changed: Condvar,
}

#[derive(Default)]
struct QueueState {
    reads: VecDeque<ReadRequest>,
    closed: bool,
}

impl Queue {
    fn push(&self, read: ReadRequest) {
        self.lock().reads.push_back(read);
        self.changed.notify_one();
    }

    fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }

    /// The next read; `None` once the queue is closed and empty.
    fn pop(&self) -> Option<ReadRequest> {
        let mut state = self.lock();
        loop {
            if let Some(read) = state.reads.pop_front() {
                return Some(read);
            }
            if state.closed {
                return None;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn serve(queue: &Queue, files: &[DirectFile], clock: &dyn Clock, sender: &Sender<Message>) {
    while let Some(mut read) = queue.pop() {
        let file = &files[read.file.index()];
        let outcome = file.read_exact_at(read.window.bytes_mut(), read.offset, read.wanted);
        let completion = Completion {
            ticket: read.ticket,
            window: read.window,
            landed_ns: clock.now_ns(),
            outcome,
        };
        if sender.send(Message::Done(completion)).is_err() {
            return;
        }
    }
}
