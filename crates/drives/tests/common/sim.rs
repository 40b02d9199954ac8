//! Experts on simulated drives: who holds what is free to choose, and every byte can be checked without being stored.

use std::collections::BTreeMap;
use std::sync::Arc;

use drives::{
    Arena, DriveId, ExpertId, Extent, FileId, Home, Landed, Layout, LayoutBuilder, PAGE_BYTES, SimBackend, SimControl,
    SimDrive, StreamOptions, Streamer, VirtualClock, sim_bytes,
};

const PAGE: u64 = PAGE_BYTES as u64;

/// A run of bytes of a file that belongs to an expert: its length, whose it is, and where it begins there.
type Part = (u64, u64, u64);

/// Collects experts and where they are.
pub struct SimWorld {
    builder: LayoutBuilder,
    drives: Vec<DriveId>,
    /// Of each drive, what its file holds, by offset.
    parts: Vec<BTreeMap<u64, Part>>,
    homes: Vec<(ExpertId, usize, usize, u64, u64, u64)>,
    extents: BTreeMap<ExpertId, Vec<Extent>>,
}

/// A streamer on simulated drives, and what is needed to look at it.
pub struct SimStream {
    pub streamer: Streamer,
    pub clock: Arc<VirtualClock>,
    pub control: SimControl,
    pub drives: Vec<DriveId>,
    extents: BTreeMap<ExpertId, Vec<Extent>>,
}

fn origin(expert: ExpertId, extent: usize) -> u64 {
    (u64::from(expert.layer) << 40) | (u64::from(expert.expert) << 8) | extent as u64
}

impl SimWorld {
    pub fn new(drives: usize) -> Self {
        let mut builder = LayoutBuilder::new();
        Self {
            drives: (0..drives)
                .map(|drive| builder.virtual_drive(&format!("drive-{drive}")))
                .collect(),
            builder,
            parts: vec![BTreeMap::new(); drives],
            homes: Vec::new(),
            extents: BTreeMap::new(),
        }
    }

    /// Adds an expert, whole on each of `drives`.
    pub fn whole(&mut self, expert: ExpertId, extents: &[Extent], drives: &[usize]) {
        self.shape(expert, extents);
        for (index, extent) in extents.iter().enumerate() {
            for &drive in drives {
                self.home(expert, index, drive, 0, extent.len);
            }
        }
    }

    /// Adds an expert without a home.
    pub fn shape(&mut self, expert: ExpertId, extents: &[Extent]) {
        self.builder.shape(expert, extents).unwrap();
        self.extents.insert(expert, extents.to_vec());
    }

    /// Adds a home of bytes `start..start + len` of an extent, behind what the drive holds already.
    pub fn home(&mut self, expert: ExpertId, extent: usize, drive: usize, start: u64, len: u64) {
        let in_page = (u64::from(self.extents[&expert][extent].page_offset) + start) % PAGE;
        let end = self.parts[drive]
            .last_key_value()
            .map_or(0, |(offset, part)| offset + part.0);
        let offset = end.next_multiple_of(PAGE) + in_page;
        self.parts[drive].insert(offset, (len, origin(expert, extent), start));
        self.homes.push((expert, extent, drive, offset, start, len));
    }

    /// Starts a streamer with this many slots. Files end where their last expert ends.
    pub fn start(mut self, slots: usize, drives: &[SimDrive], options: &StreamOptions, seed: u64) -> SimStream {
        let len = |parts: &BTreeMap<u64, Part>| parts.last_key_value().map_or(0, |(offset, part)| offset + part.0);
        let files: Vec<FileId> = self
            .drives
            .iter()
            .zip(&self.parts)
            .map(|(&drive, parts)| self.builder.virtual_file(drive, "experts", len(parts)))
            .collect();
        for (expert, extent, drive, offset, start, len) in self.homes {
            let file = files[drive];
            let home = Home {
                file,
                offset,
                start,
                len,
            };
            self.builder.home(expert, extent, home).unwrap();
        }
        let layout: Arc<Layout> = Arc::new(self.builder.build().unwrap());
        let clock = Arc::new(VirtualClock::default());
        let parts = self.parts;
        let contents = move |file: FileId, offset: u64, bytes: &mut [u8]| fill(&parts[file.index()], offset, bytes);
        let backend = SimBackend::new(layout.clone(), drives, Some(Box::new(contents)), clock.clone(), seed);
        let control = backend.control();
        let arena = Arena::new(slots * layout.slot_bytes(), layout.slot_bytes()).unwrap();
        let streamer = Streamer::single_threaded(layout, arena, Box::new(backend), clock.clone(), options).unwrap();
        SimStream {
            streamer,
            clock,
            control,
            drives: self.drives,
            extents: self.extents,
        }
    }
}

/// What a file holds from `offset` on.
fn fill(parts: &BTreeMap<u64, Part>, offset: u64, bytes: &mut [u8]) {
    let end = offset + bytes.len() as u64;
    bytes.fill(0xAA);
    for (&at, &(len, origin, start)) in parts.range(..end).rev() {
        if at + len <= offset {
            break;
        }
        let (from, to) = (at.max(offset), (at + len).min(end));
        let target = &mut bytes[(from - offset) as usize..(to - offset) as usize];
        sim_bytes(origin, start + from - at, target);
    }
}

impl SimStream {
    /// Whether every byte of a landed expert is the right one.
    pub fn is_right(&self, landed: &Landed) -> bool {
        let extents = &self.extents[&landed.expert];
        let mut expected = Vec::new();
        extents.iter().enumerate().all(|(index, extent)| {
            expected.resize(extent.len as usize, 0);
            sim_bytes(origin(landed.expert, index), 0, &mut expected);
            landed.lease.extent(index) == expected
        })
    }

    /// Demands experts, takes and checks them all.
    pub fn take(&mut self, experts: &[ExpertId]) {
        let barrier = self.streamer.demand(experts).unwrap();
        let mut count = 0;
        while let Some(landed) = self.streamer.next(&barrier).unwrap() {
            assert!(self.is_right(&landed), "expert {}", landed.expert);
            count += 1;
        }
        assert_eq!(count, experts.len());
    }

    /// Checks that the bytes of the devices add up, and returns the counters.
    pub fn balance(&self) -> drives::Counters {
        let counters = self.streamer.counters();
        assert_eq!(
            counters.device_bytes,
            counters.needed_device_bytes
                + counters.wasted_device_bytes
                + counters.reread_device_bytes
                + counters.pending_device_bytes
        );
        let drives = self.streamer.drive_counters();
        assert_eq!(
            counters.device_bytes,
            drives.iter().map(|drive| drive.device_bytes).sum::<u64>()
        );
        assert_eq!(counters.stray_completions, 0);
        counters
    }
}
