//! Which piece is read next. Pure: it knows what waits and what each drive holds, not threads, memory or time.
//!
//! A drive that has room for a read pulls a piece. Pieces are given out in the order of the demands. An expert is started by its
//! first piece, which needs a free slot. A later barrier starts experts only when every expert of the earlier ones has
//! been started, so that a barrier is never kept from its slots by one that is consumed after it.

use std::collections::VecDeque;

use crate::layout::{DriveId, ExpertId, Extent, FileId, Home, Layout};
use crate::page::{PAGE_BYTES, in_page, page_floor};

/// Names an expert of a barrier while it is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct JobId(pub(crate) u64);

/// Names a barrier. Later barriers have larger numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct BarrierId(pub(crate) u64);

/// A part of an expert that is read at once: whole pages of its slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) extent: u32,
    /// First byte in the slot, on a page border.
    pub(crate) slot_start: usize,
    /// Length in bytes, whole pages.
    pub(crate) len: usize,
    /// First byte of the extent in the piece.
    pub(crate) start: u64,
    /// Bytes of the extent in the piece.
    pub(crate) bytes: u64,
}

impl Piece {
    fn end(&self) -> u64 {
        self.start + self.bytes
    }

    /// Where the piece begins in the file of `home`, on a page border; `None` when the home does not hold all of it.
    fn offset_in(&self, home: &Home) -> Option<u64> {
        let held = home.start <= self.start && self.end() <= home.start + home.len;
        held.then(|| page_floor(home.offset + (self.start - home.start)))
    }
}

/// What a drive shall read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pull {
    pub(crate) job: JobId,
    /// The expert has no slot yet: this piece takes one.
    pub(crate) starts: bool,
    pub(crate) piece: Piece,
    pub(crate) file: FileId,
    pub(crate) offset: u64,
}

#[derive(Debug)]
struct Job {
    id: JobId,
    barrier: BarrierId,
    expert: ExpertId,
    started: bool,
    waiting: VecDeque<Piece>,
}

/// Pieces that no drive has pulled yet.
#[derive(Debug, Default)]
pub(crate) struct Schedule {
    queue: VecDeque<Job>,
}

impl Schedule {
    /// Appends an expert with its pieces.
    pub(crate) fn push(&mut self, id: JobId, barrier: BarrierId, expert: ExpertId, pieces: &[Piece]) {
        self.queue.push_back(Job {
            id,
            barrier,
            expert,
            started: false,
            waiting: pieces.iter().copied().collect(),
        });
    }

    /// The next piece for a drive, which leaves the queue; `None` when nothing that waits can be read from this drive now.
    pub(crate) fn pull(&mut self, layout: &Layout, drive: DriveId, free_slot: bool) -> Option<Pull> {
        let mut starting = None;
        let mut found = None;
        for (place, job) in self.queue.iter().enumerate() {
            let may_start = free_slot && starting.is_none_or(|barrier| barrier == job.barrier);
            if job.started || may_start {
                found = first_piece_on(layout, drive, job).map(|choice| (place, choice));
            }
            if found.is_some() {
                break;
            }
            if !job.started {
                starting.get_or_insert(job.barrier);
            }
        }
        let (place, (index, file, offset)) = found?;
        let job = &mut self.queue[place];
        let piece = job.waiting.remove(index)?;
        let pull = Pull {
            job: job.id,
            starts: !job.started,
            piece,
            file,
            offset,
        };
        job.started = true;
        if job.waiting.is_empty() {
            self.queue.remove(place);
        }
        Some(pull)
    }

    /// Forgets what waits for a barrier.
    pub(crate) fn cancel(&mut self, barrier: BarrierId) {
        self.queue.retain(|job| job.barrier != barrier);
    }
}

/// The first waiting piece that a drive holds: its index, file and offset.
fn first_piece_on(layout: &Layout, drive: DriveId, job: &Job) -> Option<(usize, FileId, u64)> {
    job.waiting.iter().enumerate().find_map(|(index, piece)| {
        let homes = layout.homes(job.expert, piece.extent as usize)?;
        homes
            .iter()
            .filter(|home| layout.drive_of(home) == drive)
            .find_map(|home| Some((index, home.file, piece.offset_in(home)?)))
    })
}

/// Bytes from the start of its slot at which each extent of an expert begins.
pub(crate) fn extent_starts(extents: &[Extent]) -> Vec<usize> {
    let mut window = 0;
    extents
        .iter()
        .map(|extent| {
            let start = window + usize::from(extent.page_offset);
            window += extent.device_bytes() as usize;
            start
        })
        .collect()
}

/// Divides an expert into pieces of at most `chunk` bytes (whole pages) that some home holds entirely. Borders lie on pages
/// of the file, so the pieces' lengths add up to the extents' whole pages.
pub(crate) fn pieces(layout: &Layout, expert: ExpertId, chunk: usize) -> Vec<Piece> {
    let extents = layout.extents(expert).unwrap_or_default();
    let mut pieces = Vec::new();
    for (index, (extent, begin)) in extents.iter().zip(extent_starts(extents)).enumerate() {
        let window = begin - usize::from(extent.page_offset);
        let pages = extent.device_bytes() as usize;
        let homes = layout.homes(expert, index).unwrap_or_default();
        let mut cuts: Vec<usize> = (0..pages).step_by(chunk).chain([pages]).collect();
        for home in homes {
            let place = |byte: u64| usize::from(extent.page_offset) + byte as usize;
            for border in [place(home.start), place(home.start + home.len)] {
                if in_page(border as u64) == 0 {
                    cuts.push(border);
                }
            }
        }
        cuts.sort_unstable();
        cuts.dedup();
        for pair in cuts.windows(2) {
            let start = (pair[0] as u64).saturating_sub(extent.page_offset.into());
            let end = (pair[1] as u64 - u64::from(extent.page_offset)).min(extent.len);
            pieces.push(Piece {
                extent: index as u32,
                slot_start: window + pair[0],
                len: pair[1] - pair[0],
                start,
                bytes: end - start,
            });
        }
    }
    debug_assert!(pieces.iter().all(|piece| piece.len.is_multiple_of(PAGE_BYTES)));
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{LayoutBuilder, Source};
    use proptest::prelude::*;

    fn id(expert: u32) -> ExpertId {
        ExpertId { layer: 0, expert }
    }

    /// `n` experts of two pages each, one home each, on drive `expert % drives`.
    fn layout(experts: u32, drives: u32) -> Layout {
        let mut builder = LayoutBuilder::new();
        let files: Vec<FileId> = (0..drives)
            .map(|drive| {
                let drive = builder.virtual_drive(&drive.to_string());
                builder.virtual_file(drive, "f", 1 << 20)
            })
            .collect();
        for expert in 0..experts {
            let source = Source {
                file: files[(expert % drives) as usize],
                offset: u64::from(expert) * 8192,
                len: 8192,
            };
            builder.expert(id(expert), &[source]).unwrap();
        }
        builder.build().unwrap()
    }

    fn push(schedule: &mut Schedule, layout: &Layout, expert: u32, barrier: u64) {
        let pieces = pieces(layout, id(expert), PAGE_BYTES);
        schedule.push(JobId(expert.into()), BarrierId(barrier), id(expert), &pieces);
    }

    fn drives(layout: &Layout) -> Vec<DriveId> {
        layout.files().iter().map(|file| file.drive).collect()
    }

    #[test]
    fn pieces_come_in_order_and_a_start_needs_a_slot() {
        let layout = layout(2, 1);
        let drive = drives(&layout)[0];
        let mut schedule = Schedule::default();
        push(&mut schedule, &layout, 0, 0);
        push(&mut schedule, &layout, 1, 0);
        assert_eq!(schedule.pull(&layout, drive, false), None);
        let first = schedule.pull(&layout, drive, true).unwrap();
        assert!(first.starts && first.offset == 0 && first.job == JobId(0));
        let second = schedule.pull(&layout, drive, false).unwrap();
        assert!(!second.starts && second.offset == 4096 && second.job == JobId(0));
        assert_eq!(schedule.pull(&layout, drive, false), None);
        assert_eq!(schedule.pull(&layout, drive, true).unwrap().job, JobId(1));
    }

    #[test]
    fn a_later_barrier_takes_no_slot_while_an_earlier_one_needs_some() {
        let layout = layout(4, 2);
        let drives = drives(&layout);
        let mut schedule = Schedule::default();
        push(&mut schedule, &layout, 0, 0); // drive 0
        push(&mut schedule, &layout, 1, 1); // drive 1
        assert_eq!(schedule.pull(&layout, drives[1], true), None);
        schedule.pull(&layout, drives[0], true).unwrap();
        assert_eq!(schedule.pull(&layout, drives[1], true).unwrap().job, JobId(1));
    }

    #[test]
    fn a_drive_passes_over_what_it_does_not_hold() {
        let layout = layout(4, 2);
        let drives = drives(&layout);
        let mut schedule = Schedule::default();
        push(&mut schedule, &layout, 0, 0);
        push(&mut schedule, &layout, 1, 0);
        assert_eq!(schedule.pull(&layout, drives[1], true).unwrap().job, JobId(1));
        schedule.cancel(BarrierId(0));
        assert_eq!(schedule.pull(&layout, drives[0], true), None);
    }

    #[test]
    fn a_copy_is_read_by_whichever_drive_asks() {
        let mut builder = LayoutBuilder::new();
        let one = builder.virtual_drive("one");
        let two = builder.virtual_drive("two");
        let file_one = builder.virtual_file(one, "f", 40_000);
        let file_two = builder.virtual_file(two, "g", 40_000);
        let source = Source {
            file: file_one,
            offset: 5000,
            len: 12_000,
        };
        builder.expert(id(0), &[source]).unwrap();
        // The copy holds all but the first page, one page further into its file.
        let start = 8192 - 5000;
        let copy = Home {
            file: file_two,
            offset: 8192 + 4096,
            start,
            len: 12_000 - start,
        };
        builder.home(id(0), 0, copy).unwrap();
        let layout = builder.build().unwrap();
        let mut schedule = Schedule::default();
        schedule.push(JobId(0), BarrierId(0), id(0), &pieces(&layout, id(0), 8192));
        let pull = schedule.pull(&layout, two, true).unwrap();
        assert_eq!((pull.file, pull.offset, pull.piece.start), (file_two, 12_288, start));
        let pull = schedule.pull(&layout, one, true).unwrap();
        assert_eq!((pull.file, pull.offset, pull.piece.start), (file_one, 4096, 0));
    }

    proptest! {
        #[test]
        fn pieces_tile_the_extents(
            extents in prop::collection::vec((0u64..9000, 1u64..60_000), 1..4),
            chunk_pages in 1usize..6,
        ) {
            let mut builder = LayoutBuilder::new();
            let drive = builder.virtual_drive("d");
            let file = builder.virtual_file(drive, "f", 1 << 20);
            let sources: Vec<Source> =
                extents.iter().map(|&(offset, len)| Source { file, offset, len }).collect();
            builder.expert(id(0), &sources).unwrap();
            let layout = builder.build().unwrap();
            let chunk = chunk_pages * PAGE_BYTES;
            let pieces = pieces(&layout, id(0), chunk);
            let shapes = layout.extents(id(0)).unwrap();
            let starts = extent_starts(shapes);
            let mut slot = 0;
            let mut bytes = vec![0; shapes.len()];
            for piece in &pieces {
                let extent = piece.extent as usize;
                prop_assert_eq!(piece.slot_start, slot);
                prop_assert_eq!(piece.start, bytes[extent]);
                prop_assert!(piece.len <= chunk && piece.bytes > 0);
                // The piece's bytes sit in the slot where the lease will show them.
                let home = layout.homes(id(0), extent).unwrap()[0];
                let offset = piece.offset_in(&home).unwrap();
                let skip = home.offset + piece.start - offset;
                prop_assert_eq!(piece.slot_start as u64 + skip, starts[extent] as u64 + piece.start);
                prop_assert!(skip + piece.bytes <= piece.len as u64);
                slot += piece.len;
                bytes[extent] += piece.bytes;
            }
            prop_assert_eq!(slot as u64, layout.device_bytes(id(0)).unwrap());
            let lens: Vec<u64> = shapes.iter().map(|extent| extent.len).collect();
            prop_assert_eq!(bytes, lens);
        }
    }
}
