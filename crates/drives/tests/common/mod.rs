//! A small world of files and experts, on disk or in memory.
#![allow(dead_code, reason = "each test file uses a part")]

pub mod sim;

use std::path::Path;
use std::sync::Arc;

use drives::{
    Arena, Backend, DEFAULT_DEPTH, ExpertId, FileId, Layout, LayoutBuilder, MemoryBackend, MonotonicClock, Notices,
    PAGE_BYTES, Source, StreamOptions, Streamer, ThreadBackend, VirtualClock,
};

/// Byte `offset` of file `file`: no two pages are alike.
pub fn byte(file: usize, offset: u64) -> u8 {
    let mixed = (offset ^ ((file as u64) << 40)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (mixed >> 56) as u8
}

pub fn contents(file: usize, len: u64) -> Vec<u8> {
    (0..len).map(|offset| byte(file, offset)).collect()
}

pub fn id(expert: usize) -> ExpertId {
    ExpertId {
        layer: 7,
        expert: expert as u32,
    }
}

/// Files by length; experts by extents of (file, offset, len).
#[derive(Debug, Clone)]
pub struct World {
    pub files: Vec<u64>,
    pub experts: Vec<Vec<(usize, u64, u64)>>,
}

impl World {
    /// `experts` of `len` bytes each, one behind the other from offset 777 of one file, which ends with the last.
    pub fn row(experts: usize, len: u64) -> Self {
        let at = |expert: usize| 777 + expert as u64 * len;
        Self {
            files: vec![at(experts)],
            experts: (0..experts).map(|expert| vec![(0, at(expert), len)]).collect(),
        }
    }

    pub fn ids(&self) -> Vec<ExpertId> {
        (0..self.experts.len()).map(id).collect()
    }

    pub fn bytes(&self) -> u64 {
        self.experts.iter().flatten().map(|extent| extent.2).sum()
    }

    fn build(&self, mut builder: LayoutBuilder, files: &[FileId]) -> Arc<Layout> {
        for (expert, extents) in self.experts.iter().enumerate() {
            let sources: Vec<Source> = extents
                .iter()
                .map(|&(file, offset, len)| Source {
                    file: files[file],
                    offset,
                    len,
                })
                .collect();
            builder.expert(id(expert), &sources).unwrap();
        }
        Arc::new(builder.build().unwrap())
    }

    pub fn on_disk(&self, folder: &Path) -> Arc<Layout> {
        let mut builder = LayoutBuilder::new();
        let files: Vec<FileId> = (0..self.files.len())
            .map(|file| {
                let path = folder.join(format!("shard-{file}"));
                std::fs::write(&path, contents(file, self.files[file])).unwrap();
                builder.file(&path).unwrap()
            })
            .collect();
        self.build(builder, &files)
    }

    /// File `i` is on drive `i`.
    pub fn in_memory(&self) -> Arc<Layout> {
        let mut builder = LayoutBuilder::new();
        let files: Vec<FileId> = (0..self.files.len())
            .map(|file| {
                let drive = builder.virtual_drive(&format!("drive-{file}"));
                builder.virtual_file(drive, &format!("shard-{file}"), self.files[file])
            })
            .collect();
        self.build(builder, &files)
    }

    pub fn memory_backend(&self, layout: &Arc<Layout>, clock: &Arc<VirtualClock>) -> MemoryBackend {
        let contents = (0..self.files.len()).map(|file| contents(file, self.files[file]));
        MemoryBackend::new(Arc::clone(layout), contents.collect(), 2, Arc::clone(clock))
    }

    /// Compares every byte of a landed expert.
    pub fn check(&self, landed: &drives::Landed) {
        let extents = &self.experts[landed.expert.expert as usize];
        assert_eq!(landed.lease.extents(), extents.len());
        for (index, &(file, offset, len)) in extents.iter().enumerate() {
            let bytes = landed.lease.extent(index);
            assert_eq!(bytes.len() as u64, len);
            assert_eq!(bytes.as_ptr().addr() % PAGE_BYTES, offset as usize % PAGE_BYTES);
            let wrong = (0..len).find(|&at| bytes[at as usize] != byte(file, offset + at));
            assert_eq!(wrong, None, "expert {}, extent {index}", landed.expert);
        }
    }
}

pub fn arena(layout: &Layout, slots: usize) -> Arc<Arena> {
    Arena::new(slots * layout.slot_bytes(), layout.slot_bytes()).unwrap()
}

/// A streamer on real files and threads.
pub fn on_threads(layout: &Arc<Layout>, slots: usize, chunk_bytes: usize) -> Streamer {
    let clock = Arc::new(MonotonicClock::new());
    let notices = Notices::default();
    let backend = ThreadBackend::open(layout, DEFAULT_DEPTH, clock.clone(), &notices).unwrap();
    let options = StreamOptions {
        chunk_bytes,
        ..StreamOptions::default()
    };
    let arena = arena(layout, slots);
    Streamer::start(Arc::clone(layout), arena, Box::new(backend), clock, &options).unwrap()
}

/// A streamer in virtual time, on the caller's thread.
pub fn in_virtual_time(
    layout: &Arc<Layout>,
    slots: usize,
    chunk_bytes: usize,
    backend: impl Backend + 'static,
    clock: &Arc<VirtualClock>,
) -> Streamer {
    let options = StreamOptions {
        chunk_bytes,
        ..StreamOptions::default()
    };
    let (layout, arena) = (Arc::clone(layout), arena(layout, slots));
    Streamer::single_threaded(layout, arena, Box::new(backend), clock.clone(), &options).unwrap()
}
