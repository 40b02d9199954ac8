//! Where experts live: drives, files, and the homes of each expert's bytes.

use std::fmt;
use std::ops::Range;
use std::path::PathBuf;

use crate::page::page_ceil;

mod builder;

pub use builder::LayoutBuilder;

/// An expert of a layer. Both count as in the published tensor names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ExpertId {
    /// The layer.
    pub layer: u32,
    /// The expert within its layer.
    pub expert: u32,
}

impl fmt::Display for ExpertId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.layer, self.expert)
    }
}

/// A drive of a [`Layout`]: its place in [`Layout::drives`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DriveId(u16);

impl DriveId {
    /// Place in [`Layout::drives`].
    pub fn index(self) -> usize {
        self.0.into()
    }

    /// The drive at a place in [`Layout::drives`].
    pub(crate) fn at(place: usize) -> Self {
        Self(place as u16)
    }
}

/// A file of a [`Layout`]: its place in [`Layout::files`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileId(u32);

impl FileId {
    /// Place in [`Layout::files`].
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// A device that experts are read from. Folders on one device are one drive.
#[derive(Debug, Clone)]
pub struct Drive {
    /// The folders on it that hold files of the layout, in the order in which they were named.
    pub folders: Vec<PathBuf>,
    /// The device's number (`st_dev`); `None` for a drive without a device.
    pub device: Option<u64>,
}

impl Drive {
    /// The first folder, as a name for people.
    pub fn name(&self) -> String {
        self.folders
            .first()
            .map_or_else(String::new, |folder| folder.display().to_string())
    }
}

/// A file that holds experts.
#[derive(Debug, Clone)]
pub struct LayoutFile {
    /// Its path.
    pub path: PathBuf,
    /// The drive that it is on.
    pub drive: DriveId,
    /// Its length in bytes.
    pub len: u64,
}

/// A contiguous run of an expert's published bytes. An expert is one extent or several, in a fixed order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// Offset mod 4096 of its first byte, the same in every file that holds it.
    pub page_offset: u16,
    /// Length in bytes.
    pub len: u64,
}

impl Extent {
    /// Bytes of the whole pages that the extent touches.
    pub fn device_bytes(&self) -> u64 {
        page_ceil(u64::from(self.page_offset) + self.len).unwrap_or(u64::MAX)
    }
}

/// A place from which a range of an extent can be read.
///
/// The range `start..start + len` of the extent's bytes lies at `offset` of `file`. Each border of the range is an end of the extent
/// or a page border of the file, so that ranges from different homes meet on pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Home {
    /// The file.
    pub file: FileId,
    /// Offset in the file of the range's first byte.
    pub offset: u64,
    /// First byte of the range, counted from the extent's start.
    pub start: u64,
    /// Length of the range in bytes.
    pub len: u64,
}

/// A run of bytes of a file: an extent where its publisher put it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Source {
    /// The file.
    pub file: FileId,
    /// Offset of the first byte.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

/// Where each expert lives. Built with a [`LayoutBuilder`], never changed afterwards.
#[derive(Debug)]
pub struct Layout {
    drives: Vec<Drive>,
    files: Vec<LayoutFile>,
    /// Sorted. Place `i` owns `extents[first_extent[i]..first_extent[i + 1]]`.
    experts: Vec<ExpertId>,
    first_extent: Vec<u32>,
    /// Place `e` owns `homes[first_home[e]..first_home[e + 1]]`.
    extents: Vec<Extent>,
    first_home: Vec<u32>,
    homes: Vec<Home>,
    slot_bytes: usize,
}

impl Layout {
    /// The drives.
    pub fn drives(&self) -> &[Drive] {
        &self.drives
    }

    /// The drives' ids, in the order of [`drives`](Self::drives).
    pub fn drive_ids(&self) -> impl Iterator<Item = DriveId> + use<> {
        (0..self.drives.len() as u16).map(DriveId)
    }

    /// The files.
    pub fn files(&self) -> &[LayoutFile] {
        &self.files
    }

    /// All experts, ascending.
    pub fn experts(&self) -> &[ExpertId] {
        &self.experts
    }

    /// The extents of an expert; `None` when the layout lacks it.
    pub fn extents(&self, expert: ExpertId) -> Option<&[Extent]> {
        let range = self.extent_range(expert)?;
        Some(&self.extents[range])
    }

    /// The homes of one extent of an expert, by ascending start; `None` when the layout lacks it.
    pub fn homes(&self, expert: ExpertId, extent: usize) -> Option<&[Home]> {
        let place = self.extent_range(expert)?.nth(extent)?;
        Some(&self.homes[self.first_home[place] as usize..self.first_home[place + 1] as usize])
    }

    /// Length of an expert in bytes, over all extents; `None` when the layout lacks it.
    pub fn expert_bytes(&self, expert: ExpertId) -> Option<u64> {
        Some(self.extents(expert)?.iter().map(|extent| extent.len).sum())
    }

    /// Bytes of whole pages that reading an expert takes; `None` when the layout lacks it.
    pub fn device_bytes(&self, expert: ExpertId) -> Option<u64> {
        let extents = self.extents(expert)?;
        Some(extents.iter().map(Extent::device_bytes).sum())
    }

    /// Bytes of a slot that holds any expert: the largest sum of [`Extent::device_bytes`].
    pub fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    /// The drive that a home is on.
    pub fn drive_of(&self, home: &Home) -> DriveId {
        self.files[home.file.index()].drive
    }

    fn extent_range(&self, expert: ExpertId) -> Option<Range<usize>> {
        let place = self.experts.binary_search(&expert).ok()?;
        Some(self.first_extent[place] as usize..self.first_extent[place + 1] as usize)
    }
}
