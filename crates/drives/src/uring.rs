//! io_uring: reads of all drives from one thread that sleeps in the kernel, on Linux.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use io_uring::squeue::{Entry, Flags};
use io_uring::{IoUring, Probe, opcode, types};
use rustix::event::PollFlags;
use rustix::io::Errno;

use crate::arena::Arena;
use crate::backend::{Backend, Completion, ReadRequest};
use crate::clock::Clock;
use crate::error::{Error, Result};
use crate::file::{DirectFile, Progress, Shortfall};
use crate::layout::{DriveId, Layout};
use crate::notice::{Notice, Notices};
use crate::threads::depth_of_each;

mod bell;
mod registered;

use bell::Bell;
use registered::Registered;

/// Most reads given to the kernel at once. More wait here; a deep queue of 8 on 16 drives fits twice.
const RING_ENTRIES: u32 = 256;

/// Pause before a system call is repeated that the kernel had no memory for.
const RETRY_PAUSE: Duration = Duration::from_millis(1);

/// Marks the answer that the bell was rung. Reads are marked by their place among the flights.
const BELL: u64 = u64::MAX;

/// Reads with io_uring: one ring for all drives, used by one thread, without a thread per read.
///
/// Files are registered with the ring, and so is the arena, so that no read looks up a file or maps a page. Where the memory
/// cannot be registered, reads map their pages, and a [`Notice`] says so. Files that are read through the page cache are read by
/// the kernel's own threads, so that a copy from the cache delays no other drive.
pub struct UringBackend {
    ring: IoUring,
    /// Dropped after the ring.
    memory: Option<Registered>,
    files: Vec<DirectFile>,
    files_registered: bool,
    depths: Vec<usize>,
    clock: Arc<dyn Clock>,
    bell: Arc<Bell>,
    /// Whether the ring watches the bell.
    listening: bool,
    flights: Flights,
    /// Flights that are not in the submission queue yet, first first.
    waiting: VecDeque<usize>,
    /// Marks of the entries in the submission queue that the kernel has not taken yet, first first.
    queued: VecDeque<u64>,
    /// Why the kernel takes no more reads.
    refusal: Option<i32>,
}

/// One read on its way.
struct Flight {
    read: ReadRequest,
    progress: Progress,
    /// Whether the file was read directly when the read was last given to the kernel.
    direct: bool,
    /// Whether a thread of the kernel makes the read, since it could not be started at once.
    threaded: bool,
}

/// Flights by place. A place is used again once its flight has ended.
#[derive(Default)]
struct Flights {
    places: Vec<Option<Flight>>,
    free: Vec<usize>,
}

impl Flights {
    fn add(&mut self, flight: Flight) -> usize {
        let place = self.free.pop().unwrap_or_else(|| {
            self.places.push(None);
            self.places.len() - 1
        });
        self.places[place] = Some(flight);
        place
    }

    fn get(&mut self, place: usize) -> Option<&mut Flight> {
        self.places.get_mut(place)?.as_mut()
    }

    fn take(&mut self, place: usize) -> Option<Flight> {
        let flight = self.places.get_mut(place)?.take()?;
        self.free.push(place);
        Some(flight)
    }

    fn len(&self) -> usize {
        self.places.len() - self.free.len()
    }
}

impl UringBackend {
    /// Opens the layout's files and a ring, with a depth for each drive in the layout's order
    /// ([`DEFAULT_DEPTH`](crate::DEFAULT_DEPTH) for drives beyond `depths`). All slots of `arena` are registered, which brings them
    /// into memory; reads into other arenas work too.
    ///
    /// # Errors
    ///
    /// [`Error::Uring`] where the kernel refuses io_uring or is too old, [`Error::Open`] when a file cannot be opened.
    pub fn open(
        layout: &Layout,
        arena: &Arc<Arena>,
        depths: &[usize],
        clock: Arc<dyn Clock>,
        notices: &Notices,
    ) -> Result<Self> {
        let refused = |error: io::Error| Error::Uring {
            reason: error.to_string(),
        };
        let ring = open_ring().map_err(refused)?;
        let bell = Bell::new().map_err(refused)?;
        let files = layout
            .files()
            .iter()
            .map(|file| DirectFile::open(&file.path, notices))
            .collect::<Result<Vec<_>>>()?;
        let numbers: Vec<_> = files.iter().map(|file| file.as_fd().as_raw_fd()).collect();
        // Without registration each read looks its file up: a small cost, and no reason to trouble anyone.
        let files_registered = ring.submitter().register_files(&numbers).is_ok();
        let memory = match Registered::new(&ring, arena) {
            Ok(memory) => Some(memory),
            Err(error) => {
                notices.add(Notice::Unregistered {
                    bytes: arena.bytes(),
                    reason: error.to_string(),
                });
                None
            }
        };
        Ok(Self {
            ring,
            memory,
            files,
            files_registered,
            depths: depth_of_each(layout, depths),
            clock,
            bell,
            listening: false,
            flights: Flights::default(),
            waiting: VecDeque::new(),
            queued: VecDeque::new(),
            refusal: None,
        })
    }

    /// Moves waiting reads into the submission queue, as far as there is room.
    fn enqueue(&mut self, done: &mut Vec<Completion>) {
        if !self.listening {
            let number = types::Fd(self.bell.as_fd().as_raw_fd());
            let watch = opcode::PollAdd::new(number, PollFlags::IN.bits().into()).build();
            self.listening = self.push(&watch.user_data(BELL));
        }
        while let Some(&place) = self.waiting.front()
            && !self.ring.submission().is_full()
        {
            self.waiting.pop_front();
            match self.entry(place) {
                Some(entry) => {
                    self.push(&entry);
                }
                None => self.land(place, Ok(()), done),
            }
        }
    }

    /// Puts an entry into the submission queue; false when that is full.
    fn push(&mut self, entry: &Entry) -> bool {
        // SAFETY: only two kinds of entry come here. The bell's names no memory, and its descriptor is open until the ring is
        // closed. A flight's reads into the flight's window. The flight owns it, and `land`, which takes it away, runs only on
        // the kernel's answer or when the kernel never took the entry; `drop` waits for the answers.
        let pushed = unsafe { self.ring.submission().push(entry) }.is_ok();
        if pushed {
            self.queued.push_back(entry.get_user_data());
        }
        pushed
    }

    /// The next call of a flight; `None` when it needs none.
    fn entry(&mut self, place: usize) -> Option<Entry> {
        let flight = self.flights.get(place)?;
        let range = flight.progress.next()?;
        let offset = flight.read.offset + range.start as u64;
        let file = flight.read.file.index();
        flight.direct = self.files[file].is_direct();
        let part = &mut flight.read.window.bytes_mut()[range];
        // A call never asks for more than 1 GiB.
        let (target, len) = (part.as_mut_ptr(), part.len() as u32);
        let memory = self.memory.as_ref();
        let buffer = memory.and_then(|memory| memory.buffer_of(target.addr(), part.len()));
        let number = types::Fd(self.files[file].as_fd().as_raw_fd());
        let fixed = types::Fixed(file as u32);
        let entry = match (self.files_registered, buffer) {
            (true, Some(buffer)) => opcode::ReadFixed::new(fixed, target, len, buffer)
                .offset(offset)
                .build(),
            (false, Some(buffer)) => opcode::ReadFixed::new(number, target, len, buffer)
                .offset(offset)
                .build(),
            (true, None) => opcode::Read::new(fixed, target, len).offset(offset).build(),
            (false, None) => opcode::Read::new(number, target, len).offset(offset).build(),
        };
        let flags = if flight.threaded || !flight.direct {
            Flags::ASYNC
        } else {
            Flags::empty()
        };
        Some(entry.flags(flags).user_data(place as u64))
    }

    /// Gives the submission queue to the kernel and, if so told, sleeps until there is an answer.
    fn enter(&mut self, sleep: bool) {
        if self.refusal.is_some() {
            return;
        }
        let outcome = self.ring.submit_and_wait(usize::from(sleep));
        let left = self.ring.submission().len();
        while self.queued.len() > left {
            self.queued.pop_front();
        }
        if let Err(error) = outcome {
            match error.raw_os_error().map(Errno::from_raw_os_error) {
                // Busy: answers must be taken first.
                Some(Errno::INTR | Errno::BUSY) => {}
                Some(Errno::AGAIN | Errno::NOMEM) => std::thread::sleep(RETRY_PAUSE),
                errno => self.refusal = Some(errno.unwrap_or(Errno::IO).raw_os_error()),
            }
        }
    }

    /// Takes all answers that are there. True when the bell was among them.
    fn reap(&mut self, done: &mut Vec<Completion>) -> bool {
        let mut rung = false;
        loop {
            let Some(answer) = self.ring.completion().next() else {
                return rung;
            };
            if answer.user_data() == BELL {
                self.listening = false;
                self.bell.quieten();
                rung = true;
            } else {
                self.book(answer.user_data() as usize, answer.result(), done);
            }
        }
    }

    /// Books the answer to one call: the read has ended, or goes on with another call.
    fn book(&mut self, place: usize, result: i32, done: &mut Vec<Completion>) {
        let Some(flight) = self.flights.get(place) else {
            return;
        };
        let outcome = usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result));
        let again = match &outcome {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && !flight.threaded => {
                flight.threaded = true;
                Ok(true)
            }
            Err(error) => self.files[flight.read.file.index()].became_buffered(flight.direct, error),
            Ok(_) => Ok(false),
        };
        let booked = match again {
            Ok(true) => Ok(()),
            Ok(false) => flight.progress.book(outcome),
            Err(error) => flight.progress.book(Err(error)),
        };
        if booked.is_ok() && flight.progress.next().is_some() {
            self.waiting.push_back(place);
        } else {
            self.land(place, booked, done);
        }
    }

    fn land(&mut self, place: usize, outcome: std::result::Result<(), Shortfall>, done: &mut Vec<Completion>) {
        let Some(Flight { read, .. }) = self.flights.take(place) else {
            return;
        };
        let file = &self.files[read.file.index()];
        done.push(Completion {
            ticket: read.ticket,
            landed_ns: self.clock.now_ns(),
            outcome: file.ended(read.offset, read.window.len(), read.wanted, outcome),
            window: read.window,
        });
    }

    /// What is left to do once the kernel takes no more reads: those that it never took fail, those that it has are waited for.
    /// Entries that it did not take stay in the submission queue, which is never given to it again.
    fn limp(&mut self, errno: i32, done: &mut Vec<Completion>) {
        let untaken = std::mem::take(&mut self.queued).into_iter();
        let unread: Vec<usize> = untaken
            .filter(|&mark| mark != BELL)
            .map(|mark| mark as usize)
            .chain(std::mem::take(&mut self.waiting))
            .collect();
        for place in unread {
            if let Some(flight) = self.flights.get(place) {
                let failed = flight.progress.book(Err(io::Error::from_raw_os_error(errno)));
                self.land(place, failed, done);
            }
        }
        if done.is_empty() && !self.bell.is_rung() {
            std::thread::sleep(RETRY_PAUSE);
        }
    }
}

impl Backend for UringBackend {
    fn depth(&self, drive: DriveId) -> usize {
        self.depths[drive.index()]
    }

    fn submit(&mut self, read: ReadRequest) {
        let place = self.flights.add(Flight {
            progress: Progress::new(read.window.len(), read.wanted),
            direct: true,
            threaded: false,
            read,
        });
        self.waiting.push_back(place);
    }

    fn wait(&mut self, done: &mut Vec<Completion>) {
        let mut landed = Vec::new();
        let mut rung = !self.bell.lie_down();
        loop {
            self.enqueue(&mut landed);
            let idle = !rung && landed.is_empty() && self.waiting.is_empty();
            self.enter(idle);
            rung |= self.reap(&mut landed) | self.bell.is_rung();
            if let Some(errno) = self.refusal {
                self.limp(errno, &mut landed);
            }
            if self.waiting.is_empty() && (rung || !landed.is_empty()) {
                break;
            }
        }
        self.bell.rise();
        done.append(&mut landed);
    }

    fn waker(&self) -> Waker {
        Arc::clone(&self.bell).into()
    }

    fn describe(&self) -> String {
        match self.memory {
            Some(_) => "io_uring, registered memory".into(),
            None => "io_uring".into(),
        }
    }
}

impl Drop for UringBackend {
    /// Waits for the reads that the kernel has, since it writes to their windows until it answers. The others never start.
    fn drop(&mut self) {
        let mut landed = Vec::new();
        while self.flights.len() > self.waiting.len() {
            self.enter(true);
            self.reap(&mut landed);
            if let Some(errno) = self.refusal {
                self.limp(errno, &mut landed);
            }
            landed.clear();
        }
        // The kernel takes a closed ring apart at its leisure, and until then a drive could not be unmounted. What fails here
        // is done then.
        let _ = self.ring.submitter().unregister_files();
        let _ = self.ring.submitter().unregister_buffers();
    }
}

/// A ring on a kernel that has what is needed.
fn open_ring() -> io::Result<IoUring> {
    // Cooperative: answers are booked when this thread enters the kernel, without interrupting it before. From Linux 5.19 on.
    let ring = match IoUring::builder().setup_coop_taskrun().build(RING_ENTRIES) {
        Err(error) if error.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => IoUring::new(RING_ENTRIES)?,
        outcome => outcome?,
    };
    let mut probe = Probe::new();
    ring.submitter().register_probe(&mut probe)?;
    let needed = [opcode::Read::CODE, opcode::ReadFixed::CODE, opcode::PollAdd::CODE];
    if !(ring.params().is_feature_nodrop() && needed.iter().all(|&code| probe.is_supported(code))) {
        return Err(io::Error::other("the kernel's io_uring is older than 5.6"));
    }
    Ok(ring)
}
