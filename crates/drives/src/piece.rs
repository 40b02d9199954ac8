//! Parts of an expert: runs with the same homes, and the pieces that are cut from them, one for each read.

use crate::drive_set::DriveSet;
use crate::layout::{DriveId, ExpertId, Extent, FileId, Home, Layout};
use crate::page::{PAGE_BYTES, in_page, page_floor};

/// A part of an expert that is read at once, or waits to be: whole pages of its slot.
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
    pub(crate) fn offset_in(&self, home: &Home) -> Option<u64> {
        let held = home.start <= self.start && self.end() <= home.start + home.len;
        held.then(|| page_floor(home.offset + (self.start - home.start)))
    }

    /// Cuts off the first `len` bytes of the slot, whole pages and less than all. The rest stays.
    pub(crate) fn split(&mut self, page_offset: u16, len: usize) -> Self {
        debug_assert!(len.is_multiple_of(PAGE_BYTES) && 0 < len && len < self.len);
        let first = Self {
            len,
            bytes: len as u64 - self.skip(page_offset) as u64,
            ..*self
        };
        self.slot_start += len;
        self.len -= len;
        self.start += first.bytes;
        self.bytes -= first.bytes;
        first
    }

    /// Bytes of the first page before the extent, whose offset mod 4096 is `page_offset`.
    pub(crate) fn skip(&self, page_offset: u16) -> usize {
        if self.start == 0 { page_offset.into() } else { 0 }
    }

    /// The file and offset from which a drive can read the piece; files in `tried` do not count.
    pub(crate) fn home_on(
        &self,
        layout: &Layout,
        expert: ExpertId,
        drive: DriveId,
        tried: &[FileId],
    ) -> Option<(FileId, u64)> {
        layout
            .homes(expert, self.extent as usize)?
            .iter()
            .filter(|home| layout.drive_of(home) == drive && !tried.contains(&home.file))
            .find_map(|home| Some((home.file, self.offset_in(home)?)))
    }

    /// The drives that hold all of the piece; files in `tried` do not count.
    pub(crate) fn holders(&self, layout: &Layout, expert: ExpertId, tried: &[FileId]) -> DriveSet {
        let homes = layout.homes(expert, self.extent as usize).unwrap_or_default();
        homes
            .iter()
            .filter(|home| !tried.contains(&home.file) && self.offset_in(home).is_some())
            .map(|home| layout.drive_of(home).index())
            .collect()
    }
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

/// Divides an expert into the longest runs such that a home holds all of a run or nothing of it. Borders lie on pages of the
/// file, so the runs' lengths add up to the extents' whole pages.
pub(crate) fn runs(layout: &Layout, expert: ExpertId) -> Vec<Piece> {
    let extents = layout.extents(expert).unwrap_or_default();
    let mut runs = Vec::new();
    for (index, (extent, begin)) in extents.iter().zip(extent_starts(extents)).enumerate() {
        let window = begin - usize::from(extent.page_offset);
        let mut cuts = vec![0, extent.device_bytes() as usize];
        for home in layout.homes(expert, index).unwrap_or_default() {
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
            runs.push(Piece {
                extent: index as u32,
                slot_start: window + pair[0],
                len: pair[1] - pair[0],
                start,
                bytes: end - start,
            });
        }
    }
    debug_assert!(runs.iter().all(|run| run.len.is_multiple_of(PAGE_BYTES)));
    runs
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{LayoutBuilder, Source};
    use proptest::prelude::*;

    const ID: ExpertId = ExpertId { layer: 0, expert: 0 };

    #[test]
    fn runs_end_where_homes_do() {
        let mut builder = LayoutBuilder::new();
        let drives = ["one", "two"].map(|name| builder.virtual_drive(name));
        let files = drives.map(|drive| builder.virtual_file(drive, "f", 40_000));
        let source = Source {
            file: files[0],
            offset: 5000,
            len: 12_000,
        };
        builder.expert(ID, &[source]).unwrap();
        // The copy holds all but the first page, one page further into its file.
        let copy = Home {
            file: files[1],
            offset: 12_288,
            start: 8192 - 5000,
            len: 12_000 - (8192 - 5000),
        };
        builder.home(ID, 0, copy).unwrap();
        let layout = builder.build().unwrap();
        let runs = runs(&layout, ID);
        let shapes: Vec<_> = runs
            .iter()
            .map(|run| (run.slot_start, run.len, run.start, run.bytes))
            .collect();
        assert_eq!(shapes, [(0, 4096, 0, 3192), (4096, 12_288, 3192, 8808)]);
        let holders = |run: usize, tried: &[FileId]| runs[run].holders(&layout, ID, tried).places().collect::<Vec<_>>();
        assert_eq!(holders(0, &[]), [0]);
        assert_eq!(holders(1, &[]), [0, 1]);
        assert_eq!(holders(1, &files[..1]), [1]);
        assert_eq!(runs[0].home_on(&layout, ID, drives[0], &[]), Some((files[0], 4096)));
        assert_eq!(runs[0].home_on(&layout, ID, drives[1], &[]), None);
        assert_eq!(runs[1].home_on(&layout, ID, drives[1], &[]), Some((files[1], 12_288)));
        assert_eq!(runs[1].home_on(&layout, ID, drives[1], &files[1..]), None);
    }

    proptest! {
        #[test]
        fn pieces_cover_each_byte_once(
            extents in prop::collection::vec((0u64..20_000, 1u64..30_000), 1..5),
            lens in prop::collection::vec(1usize..5, 1..100),
        ) {
            let mut builder = LayoutBuilder::new();
            let drive = builder.virtual_drive("d");
            let file = builder.virtual_file(drive, "f", 1 << 20);
            let sources: Vec<Source> =
                extents.iter().map(|&(offset, len)| Source { file, offset, len }).collect();
            builder.expert(ID, &sources).unwrap();
            let layout = builder.build().unwrap();
            let shapes = layout.extents(ID).unwrap();
            let mut lens = lens.iter().cycle().map(|pages| pages * PAGE_BYTES);
            let mut pieces = Vec::new();
            for mut rest in runs(&layout, ID) {
                let offset = shapes[rest.extent as usize].page_offset;
                while let Some(len) = lens.next().filter(|&len| len < rest.len) {
                    pieces.push(rest.split(offset, len));
                }
                pieces.push(rest);
            }
            let starts = extent_starts(shapes);
            let mut slot = 0;
            let mut bytes = vec![0; shapes.len()];
            for piece in &pieces {
                let extent = piece.extent as usize;
                prop_assert_eq!(piece.slot_start, slot);
                prop_assert_eq!(piece.start, bytes[extent]);
                prop_assert!(piece.bytes > 0);
                // The piece's bytes sit in the slot where the lease will show them.
                let home = layout.homes(ID, extent).unwrap()[0];
                let offset = piece.offset_in(&home).unwrap();
                let skip = home.offset + piece.start - offset;
                prop_assert_eq!(skip as usize, piece.skip(shapes[extent].page_offset));
                prop_assert_eq!(piece.slot_start as u64 + skip, starts[extent] as u64 + piece.start);
                prop_assert!(skip + piece.bytes <= piece.len as u64);
                slot += piece.len;
                bytes[extent] += piece.bytes;
            }
            prop_assert_eq!(slot as u64, layout.device_bytes(ID).unwrap());
            let lens: Vec<u64> = shapes.iter().map(|extent| extent.len).collect();
            prop_assert_eq!(bytes, lens);
        }
    }
}
