//! Bytes from disks.
//!
//! This crate brings *experts* into memory as fast as drives deliver them. It knows no tensor: an expert is an [`ExpertId`] whose
//! published bytes are one [`Extent`] or several.
//!
//! A [`Layout`] says where each expert lives: *drives* (folders on one device are one drive), files, and for each range of an
//! extent one *home* or more. An [`Arena`] is the memory that experts land in: one mapping, taken at start, never
//! grown, divided into equal slots. A slot holds one expert, and each extent keeps its file offset mod 4096 in it, so that a
//! direct read, which moves whole pages, puts every byte where it is used, without a copy.
//!
//! A [`Streamer`] joins the two. [`Streamer::demand`] opens a [`Barrier`] for a set of experts, each asked for once, and
//! [`Streamer::next`] hands out experts as they land, each with a [`SlotLease`]. While the caller computes with it, further reads
//! go on. Dropping the lease frees the slot, so a barrier larger than the arena flows through. [`Streamer::hint`] names experts that
//! will perhaps be demanded: they are read where drives would have nothing to do.
//!
//! Several drives work as one. A drive with room for a read *pulls* the next piece that it holds: demand before hint, the earliest
//! barrier first, what the fewest other drives hold first, in pieces that shrink so that all drives end together. It leaves a piece to
//! drives that are expected to do it sooner, by the rates at which they have lately delivered. A piece that fails is read from
//! another home, one that is late by far is read there too, and the first to land counts. The decision is a pure function, apart from
//! threads and time.
//!
//! The reading itself is behind [`Backend`]: [`ThreadBackend`] (positional reads on threads), [`MemoryBackend`] (files in memory, with
//! faults on order) and [`SimBackend`] (modelled drives in virtual time, from a seed). Time comes from a [`Clock`]. Every read leaves
//! a [`ReadEvent`] and is counted in [`Counters`] and [`DriveCounters`]; every barrier leaves a [`BarrierReport`] that sets its time
//! against the shortest that its drives allow.
//!
//! A *pack* is a file of chosen ranges of chosen experts ([`PackContents`], [`write_pack`]); its [`PackIndex`] gives homes and checksums.
//!
//! What is read once, such as the trunk of a model or a row of its embedding, needs no slot: [`AlignedBuf::read_range`] reads any
//! byte range of a [`DirectFile`] into memory of its own. Where direct reads are refused, reads go through the page cache, leave
//! nothing in it, and add a [`Notice`] for the user.
//!
//! ```
//! use std::sync::Arc;
//! use drives::{
//!     Arena, DEFAULT_DEPTH, ExpertId, LayoutBuilder, MonotonicClock, Notices, Source, StreamOptions, Streamer, ThreadBackend,
//! };
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let folder = tempfile::tempdir()?;
//! let path = folder.path().join("shard");
//! std::fs::write(&path, "......expert zero, expert one")?;
//!
//! let mut builder = LayoutBuilder::new();
//! let file = builder.file(&path)?;
//! let ids = [0, 1].map(|expert| ExpertId { layer: 0, expert });
//! builder.expert(ids[0], &[Source { file, offset: 6, len: 11 }])?;
//! builder.expert(ids[1], &[Source { file, offset: 19, len: 10 }])?;
//! let layout = Arc::new(builder.build()?);
//!
//! let (clock, notices) = (Arc::new(MonotonicClock::new()), Notices::default());
//! let arena = Arena::new(4 * layout.slot_bytes(), layout.slot_bytes())?;
//! let backend = ThreadBackend::open(&layout, DEFAULT_DEPTH, clock.clone(), &notices)?;
//! let mut streamer = Streamer::start(layout, arena, Box::new(backend), clock, &StreamOptions::default())?;
//!
//! let barrier = streamer.demand(&ids)?;
//! while let Some(landed) = streamer.next(&barrier)? {
//!     let expected = if landed.expert == ids[0] { "expert zero" } else { "expert one" };
//!     assert_eq!(landed.lease.extent(0), expected.as_bytes());
//! }
//! assert_eq!(streamer.counters().expert_bytes_read, 21);
//! # Ok(())
//! # }
//! ```

mod arena;
mod backend;
mod barrier_report;
mod buffer;
mod cache;
mod clock;
mod counters;
mod device;
mod drive_set;
mod error;
mod events;
mod fields;
mod file;
mod histogram;
mod job;
mod layout;
mod map;
mod memory;
mod notice;
mod open;
mod pace;
mod pack;
mod page;
mod piece;
mod platform;
mod profile;
mod reads;
mod report;
mod schedule;
mod sim;
mod state;
mod stream;
mod threads;
mod tickets;
#[cfg(target_os = "linux")]
mod uring;

pub use arena::{Arena, SlotLease, Window};
pub use backend::{Backend, Completion, ReadRequest, Ticket};
pub use barrier_report::{BARRIER_CAPACITY, BarrierBatch, BarrierReport};
pub use buffer::{AlignedBuf, LINE_BYTES, READ_PIECE_BYTES};
pub use clock::{Clock, MonotonicClock, VirtualClock};
pub use counters::{Counters, DriveCounters};
pub use device::Device;
pub use drive_set::MAX_DRIVES;
pub use error::{Error, ReadError, Result};
pub use events::{EVENT_CAPACITY, EventBatch, EventFeed, ReadClass, ReadEvent};
pub use fields::Fields;
pub use file::DirectFile;
pub use histogram::Latencies;
pub use layout::{Drive, DriveId, ExpertId, Extent, FileId, Home, Layout, LayoutBuilder, LayoutFile, Source};
pub use map::HugePages;
pub use memory::{Fault, MemoryBackend};
pub use notice::{Notice, Notices};
pub use open::{Reader, open_best};
pub use pack::{
    BadChunk, CHECKSUM_CHUNK_BYTES, FileIdentity, MAX_CHECKSUM_CHUNK_BYTES, MAX_INDEX_BYTES, MAX_NAME_BYTES,
    PACK_SUFFIX, PARTIAL_SUFFIX, PackContents, PackError, PackIndex, PackPhase, PackProgress, PackRange, PackReport,
    PackShard, PartialFile, SAMPLES, free_bytes, sweep_partials, verify_pack, write_pack,
};
pub use page::PAGE_BYTES;
pub use profile::{
    CHUNK_SIZES, DEPTHS, DriveProfile, DriveSpeed, MEASURE_BUDGET, MOST_IN_FLIGHT, PATIENCE, PROFILE_MAX_AGE, Profile,
};
pub use reads::{RawLanding, RawReads};
pub use report::{DriveReport, describe, report};
pub use schedule::FLOOR_BYTES;
pub use sim::{SimBackend, SimControl, SimDrive, SimFaults, SimRandom, SimServer, sim_bytes};
pub use state::{FAILURES_OUT, LATE_FACTOR, LATE_FLOOR_NS, Landed};
pub use stream::{Barrier, CHUNK_BYTES, DriveTuning, Hint, LEASE_PATIENCE, StreamOptions, Streamer};
pub use threads::{DEFAULT_DEPTH, ThreadBackend};
#[cfg(target_os = "linux")]
pub use uring::UringBackend;
