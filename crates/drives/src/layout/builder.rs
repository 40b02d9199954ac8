//! Collecting a layout and checking it.

use std::collections::HashMap;
use std::fs::Metadata;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::{Drive, DriveId, ExpertId, Extent, FileId, Home, Layout, LayoutFile, Source};
use crate::error::{Error, Result};
use crate::page::in_page;

struct Draft {
    id: ExpertId,
    extents: Vec<Extent>,
    homes: Vec<(usize, Home)>,
}

/// Collects drives, files and homes, and checks them.
#[derive(Default)]
pub struct LayoutBuilder {
    drives: Vec<Drive>,
    files: Vec<LayoutFile>,
    known_files: HashMap<PathBuf, FileId>,
    drafts: Vec<Draft>,
    known_experts: HashMap<ExpertId, usize>,
}

impl LayoutBuilder {
    /// An empty layout.
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether no expert was added.
    pub fn is_empty(&self) -> bool {
        self.drafts.is_empty()
    }

    /// Adds a folder. Folders on one device give one drive.
    ///
    /// # Errors
    ///
    /// [`Error::Open`] when the folder cannot be examined.
    pub fn folder(&mut self, path: &Path) -> Result<DriveId> {
        let device = examine(path)?.dev();
        Ok(self.drive_on(device, path))
    }

    /// Adds a file, and its folder if that is new. A path that was added before gives the same file.
    ///
    /// # Errors
    ///
    /// [`Error::Open`] when the file cannot be examined.
    pub fn file(&mut self, path: &Path) -> Result<FileId> {
        if let Some(&known) = self.known_files.get(path) {
            return Ok(known);
        }
        let found = examine(path)?;
        let folder = path.parent().unwrap_or(Path::new("/"));
        let drive = self.drive_on(found.dev(), folder);
        let file = self.push_file(path.to_path_buf(), drive, found.len());
        self.known_files.insert(path.to_path_buf(), file);
        Ok(file)
    }

    /// Adds a drive without a device, for the memory back end.
    pub fn virtual_drive(&mut self, name: &str) -> DriveId {
        self.push_drive(Drive {
            folders: vec![name.into()],
            device: None,
        })
    }

    /// Adds a file of `len` bytes that is on no disk, for the memory back end.
    pub fn virtual_file(&mut self, drive: DriveId, name: &str, len: u64) -> FileId {
        self.push_file(name.into(), drive, len)
    }

    /// Adds an expert that lies in `sources`, one extent each, in this order.
    ///
    /// # Errors
    ///
    /// [`Error::Layout`] when the expert was added before.
    pub fn expert(&mut self, id: ExpertId, sources: &[Source]) -> Result<()> {
        let extents: Vec<Extent> = sources
            .iter()
            .map(|source| Extent {
                page_offset: in_page(source.offset) as u16,
                len: source.len,
            })
            .collect();
        self.shape(id, &extents)?;
        for (extent, source) in sources.iter().enumerate() {
            let home = Home {
                file: source.file,
                offset: source.offset,
                start: 0,
                len: source.len,
            };
            self.home(id, extent, home)?;
        }
        Ok(())
    }

    /// Adds an expert by its extents alone; [`home`](Self::home) says where they are.
    ///
    /// # Errors
    ///
    /// [`Error::Layout`] when the expert was added before.
    pub fn shape(&mut self, id: ExpertId, extents: &[Extent]) -> Result<()> {
        if self.known_experts.insert(id, self.drafts.len()).is_some() {
            return Err(wrong(id, "it is listed twice, expected once".into()));
        }
        self.drafts.push(Draft {
            id,
            extents: extents.to_vec(),
            homes: Vec::new(),
        });
        Ok(())
    }

    /// Adds a home of a range of extent `extent` of an expert.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownExpert`] when the expert was not added before.
    pub fn home(&mut self, id: ExpertId, extent: usize, home: Home) -> Result<()> {
        let draft = self.known_experts.get(&id).ok_or(Error::UnknownExpert(id))?;
        self.drafts[*draft].homes.push((extent, home));
        Ok(())
    }

    /// Checks everything and makes the layout.
    ///
    /// # Errors
    ///
    /// [`Error::EmptyLayout`] without experts. [`Error::Layout`] names the first expert that has no bytes, has bytes without a
    /// home, or has a home that lies outside its file or extent or breaks the rule on borders.
    pub fn build(mut self) -> Result<Layout> {
        if self.drafts.is_empty() {
            return Err(Error::EmptyLayout);
        }
        self.drafts.sort_unstable_by_key(|draft| draft.id);
        let mut layout = Layout {
            drives: self.drives,
            files: self.files,
            experts: Vec::with_capacity(self.drafts.len()),
            first_extent: vec![0],
            extents: Vec::new(),
            first_home: vec![0],
            homes: Vec::new(),
            slot_bytes: 0,
        };
        for mut draft in self.drafts {
            let slot_bytes = check(&draft, &layout.files)?;
            layout.slot_bytes = layout.slot_bytes.max(slot_bytes);
            layout.experts.push(draft.id);
            draft.homes.sort_by_key(|(extent, home)| (*extent, home.start));
            let mut homes = draft.homes.into_iter().peekable();
            for (index, extent) in draft.extents.into_iter().enumerate() {
                while let Some((_, home)) = homes.next_if(|(extent, _)| *extent == index) {
                    layout.homes.push(home);
                }
                layout.extents.push(extent);
                layout.first_home.push(layout.homes.len() as u32);
            }
            layout.first_extent.push(layout.extents.len() as u32);
        }
        Ok(layout)
    }

    fn drive_on(&mut self, device: u64, folder: &Path) -> DriveId {
        let known = self.drives.iter().position(|drive| drive.device == Some(device));
        let Some(index) = known else {
            return self.push_drive(Drive {
                folders: vec![folder.to_path_buf()],
                device: Some(device),
            });
        };
        let folders = &mut self.drives[index].folders;
        if !folders.iter().any(|known| known == folder) {
            folders.push(folder.to_path_buf());
        }
        DriveId(index as u16)
    }

    fn push_drive(&mut self, drive: Drive) -> DriveId {
        self.drives.push(drive);
        DriveId((self.drives.len() - 1) as u16)
    }

    fn push_file(&mut self, path: PathBuf, drive: DriveId, len: u64) -> FileId {
        self.files.push(LayoutFile { path, drive, len });
        FileId((self.files.len() - 1) as u32)
    }
}

fn examine(path: &Path) -> Result<Metadata> {
    std::fs::metadata(path).map_err(|error| Error::Open {
        path: path.to_path_buf(),
        reason: error.to_string(),
    })
}

fn wrong(expert: ExpertId, problem: String) -> Error {
    Error::Layout { expert, problem }
}

/// Checks one expert and returns the bytes of its slot.
fn check(draft: &Draft, files: &[LayoutFile]) -> Result<usize> {
    let fail = |problem: String| Err(wrong(draft.id, problem));
    if draft.extents.is_empty() {
        return fail("it has no extents, expected at least one".into());
    }
    for (index, home) in &draft.homes {
        let Some(extent) = draft.extents.get(*index) else {
            let count = draft.extents.len();
            return fail(format!("a home names extent {index}, expected one of {count}"));
        };
        if let Err(problem) = check_home(extent, home, files) {
            return fail(problem);
        }
    }
    let mut slot_bytes = 0usize;
    for (index, extent) in draft.extents.iter().enumerate() {
        let page_offset = extent.page_offset;
        if extent.len == 0 || in_page(page_offset.into()) != u64::from(page_offset) {
            return fail(format!(
                "extent {index} has {} bytes at page offset {page_offset}, expected at least 1 byte at an offset below 4096",
                extent.len
            ));
        }
        let homes = draft.homes.iter().filter(|(of, _)| *of == index);
        if let Some(gap) = first_gap(homes.map(|(_, home)| *home).collect(), extent.len) {
            return fail(format!(
                "bytes {}..{} of extent {index} have no home, expected one for each of its {} bytes",
                gap.start, gap.end, extent.len
            ));
        }
        slot_bytes = usize::try_from(extent.device_bytes())
            .ok()
            .and_then(|bytes| slot_bytes.checked_add(bytes))
            .filter(|&bytes| bytes <= MAX_SLOT_BYTES)
            .ok_or_else(|| {
                let len = extent.len;
                wrong(
                    draft.id,
                    format!("extent {index} has {len} bytes, expected an expert of at most {MAX_SLOT_BYTES}"),
                )
            })?;
    }
    Ok(slot_bytes)
}

/// Largest expert in bytes: positions inside a slot fit in 32 bits. Published experts have 5 to 200 MB.
const MAX_SLOT_BYTES: usize = u32::MAX as usize;

fn check_home(extent: &Extent, home: &Home, files: &[LayoutFile]) -> std::result::Result<(), String> {
    let Some(file) = files.get(home.file.index()) else {
        return Err(format!(
            "a home names file {}, expected one of {}",
            home.file.0,
            files.len()
        ));
    };
    let (path, file_len) = (file.path.display(), file.len);
    let (offset, start, len) = (home.offset, home.start, home.len);
    let end = start.checked_add(len).filter(|&end| end <= extent.len && len > 0);
    let Some(end) = end else {
        let whole = extent.len;
        return Err(format!(
            "{path}: a home of {len} bytes from byte {start} does not fit in its extent of {whole}"
        ));
    };
    if offset.checked_add(len).is_none_or(|end| end > file_len) {
        return Err(format!(
            "{path}: {len} bytes at offset {offset} reach beyond the file's {file_len}"
        ));
    }
    let place = u64::from(extent.page_offset) + start;
    if in_page(offset) != in_page(place) {
        let (found, expected) = (in_page(offset), in_page(place));
        return Err(format!(
            "{path}: offset {offset} mod 4096 is {found}, expected {expected} as in the published file"
        ));
    }
    let on_page = |byte: u64| in_page(u64::from(extent.page_offset) + byte) == 0;
    if !((start == 0 || on_page(start)) && (end == extent.len || on_page(end))) {
        return Err(format!(
            "{path}: a home covers bytes {start}..{end} of its extent, expected borders on pages or ends"
        ));
    }
    Ok(())
}

/// The first bytes of `0..len` that no home covers.
fn first_gap(mut homes: Vec<Home>, len: u64) -> Option<Range<u64>> {
    homes.sort_by_key(|home| home.start);
    let mut covered = 0;
    for home in homes {
        if home.start > covered {
            return Some(covered..home.start);
        }
        covered = covered.max(home.start + home.len);
    }
    (covered < len).then_some(covered..len)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: ExpertId = ExpertId { layer: 1, expert: 2 };

    fn one_file(len: u64) -> (LayoutBuilder, FileId) {
        let mut builder = LayoutBuilder::new();
        let drive = builder.virtual_drive("a");
        let file = builder.virtual_file(drive, "shard", len);
        (builder, file)
    }

    fn problem(builder: LayoutBuilder) -> String {
        builder.build().unwrap_err().to_string()
    }

    #[test]
    fn a_published_expert_has_one_home() {
        let (mut builder, file) = one_file(1 << 20);
        let source = Source {
            file,
            offset: 4095,
            len: 4098,
        };
        builder.expert(ID, &[source]).unwrap();
        let layout = builder.build().unwrap();
        assert_eq!(layout.experts(), [ID]);
        assert_eq!(layout.expert_bytes(ID), Some(4098));
        assert_eq!(layout.device_bytes(ID), Some(3 * 4096));
        assert_eq!(layout.slot_bytes(), 3 * 4096);
        assert_eq!(layout.homes(ID, 0).unwrap().len(), 1);
        assert!(layout.homes(ID, 1).is_none());
        let other = ExpertId { layer: 1, expert: 3 };
        assert!(layout.extents(other).is_none());
    }

    #[test]
    fn ranges_may_be_split_and_copied_at_page_borders() {
        let (mut builder, file) = one_file(1 << 20);
        let other_drive = builder.virtual_drive("b");
        let pack = builder.virtual_file(other_drive, "pack", 1 << 20);
        let extent = Extent {
            page_offset: 100,
            len: 10_000,
        };
        builder.shape(ID, &[extent]).unwrap();
        let first = Home {
            file,
            offset: 100,
            start: 0,
            len: 8192 - 100,
        };
        let second = Home {
            file: pack,
            offset: 40_960,
            start: 8192 - 100,
            len: 10_000 - (8192 - 100),
        };
        builder.home(ID, 0, second).unwrap();
        builder.home(ID, 0, first).unwrap();
        let layout = builder.build().unwrap();
        let homes = layout.homes(ID, 0).unwrap();
        assert_eq!(homes, [first, second]);
        assert_eq!(layout.drive_of(&homes[1]), other_drive);
    }

    #[test]
    fn gaps_and_wild_homes_are_named() {
        let source = |file, offset, len| Source { file, offset, len };

        let (mut builder, file) = one_file(5000);
        builder.expert(ID, &[source(file, 4000, 1001)]).unwrap();
        let text = problem(builder);
        assert!(
            text.contains("expert 1/2: shard: 1001 bytes at offset 4000 reach beyond the file's 5000"),
            "{text}"
        );

        let (mut builder, file) = one_file(5000);
        builder.expert(ID, &[source(file, u64::MAX, 2)]).unwrap();
        assert!(problem(builder).contains("beyond the file"));

        let (mut builder, file) = one_file(5000);
        builder.expert(ID, &[source(file, 0, 0)]).unwrap();
        assert!(problem(builder).contains("does not fit in its extent of 0"));

        let (mut builder, file) = one_file(50_000);
        let extent = Extent {
            page_offset: 0,
            len: 20_000,
        };
        builder.shape(ID, &[extent]).unwrap();
        let home = Home {
            file,
            offset: 4096,
            start: 4096,
            len: 4096,
        };
        builder.home(ID, 0, home).unwrap();
        assert!(problem(builder).contains("bytes 0..4096 of extent 0 have no home"));

        for (offset, start, len, expected) in [
            (1, 0, 20_000, "mod 4096 is 1, expected 0"),
            (5, 5, 19_995, "borders on pages"),
            (0, 0, 5000, "borders on pages"),
        ] {
            let (mut builder, file) = one_file(50_000);
            builder.shape(ID, &[extent]).unwrap();
            let home = Home {
                file,
                offset,
                start,
                len,
            };
            builder.home(ID, 0, home).unwrap();
            let text = problem(builder);
            assert!(text.contains(expected), "{text}");
        }

        assert!(matches!(LayoutBuilder::new().build(), Err(Error::EmptyLayout)));
        let (mut builder, file) = one_file(5000);
        builder.expert(ID, &[source(file, 0, 1)]).unwrap();
        assert!(builder.expert(ID, &[source(file, 0, 1)]).is_err());
    }

    #[test]
    fn folders_on_one_device_are_one_drive() {
        let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let path = two.path().join("shard");
        std::fs::write(&path, [0; 10]).unwrap();
        let mut builder = LayoutBuilder::new();
        let drive = builder.folder(one.path()).unwrap();
        assert_eq!(builder.folder(two.path()).unwrap(), drive);
        let file = builder.file(&path).unwrap();
        assert_eq!(builder.file(&path).unwrap(), file);
        let source = Source {
            file,
            offset: 3,
            len: 7,
        };
        builder.expert(ID, &[source]).unwrap();
        let layout = builder.build().unwrap();
        assert_eq!(layout.drives().len(), 1);
        assert_eq!(layout.drives()[0].folders, [one.path(), two.path()]);
        assert_eq!(layout.files().len(), 1);
        assert!(LayoutBuilder::new().file(&one.path().join("none")).is_err());
    }

    #[test]
    fn a_layout_of_every_expert_of_a_large_model_is_small() {
        const EXPERTS: u32 = 82_432;
        const BYTES: u64 = 17_547_264;
        let (mut builder, file) = one_file(u64::from(EXPERTS) * BYTES + 100);
        for n in (0..EXPERTS).rev() {
            let id = ExpertId {
                layer: n / 896,
                expert: n % 896,
            };
            let source = Source {
                file,
                offset: 100 + u64::from(n) * BYTES,
                len: BYTES,
            };
            builder.expert(id, &[source]).unwrap();
        }
        let layout = builder.build().unwrap();
        assert_eq!(layout.experts().len(), EXPERTS as usize);
        assert_eq!(layout.slot_bytes(), 4285 * 4096);
        let last = ExpertId { layer: 91, expert: 895 };
        let offset = 100 + u64::from(EXPERTS - 1) * BYTES;
        assert_eq!(layout.homes(last, 0).unwrap()[0].offset, offset);
        let bytes = size_of_val(&layout.experts[..])
            + size_of_val(&layout.first_extent[..])
            + size_of_val(&layout.extents[..])
            + size_of_val(&layout.first_home[..])
            + size_of_val(&layout.homes[..]);
        assert!(bytes < 8_000_000, "{bytes} bytes");
    }
}
