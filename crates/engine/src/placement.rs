//! Where experts are read from: the model's folder, copies of its shards, packs.
//!
//! The formats are drawn in `docs/layout.md`.

use checkpoint::{Checkpoint, ExpertPlace, RawHeader};
use drives::{
    ExpertId, Extent, FileId, FileIdentity, Home, Layout, LayoutBuilder, Notices, PACK_SUFFIX, PackIndex, PackShard,
};
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

mod check;
mod error;
mod layout_file;
mod place;
mod plan;

pub(crate) use check::Checksums;
pub use error::PlacementError;
pub use layout_file::NamedDrive;
pub use place::{PlaceOptions, PlaceProgress, PlaceReport, place};
pub use plan::{ExpertSet, Part, PlacePlan, PlanLine};

/// Experts that an error names before it only counts.
const NAMED: usize = 5;

/// The folders that experts are read from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    /// Folders with shards or packs, besides the model's own.
    pub drives: Vec<NamedDrive>,
    /// Whether experts are read from the model's own folder too.
    pub model_folder: bool,
}

impl Default for Placement {
    /// The model's folder alone.
    fn default() -> Self {
        Self {
            drives: Vec::new(),
            model_folder: true,
        }
    }
}

/// Where every expert lies.
#[derive(Debug)]
pub struct Placed {
    /// Drives, files and homes.
    pub layout: Layout,
    /// The packs among the files, with their checksums.
    pub packs: Vec<PackIndex>,
    /// What each folder holds, in the order in which they were named, the model's first.
    pub folders: Vec<FolderReport>,
}

/// What a folder adds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FolderReport {
    /// The folder.
    pub path: PathBuf,
    /// The user's words about it.
    pub note: String,
    /// Shards of the model.
    pub shards: usize,
    /// Packs.
    pub packs: usize,
    /// Shards and packs that add nothing, since they are links to files that are known already.
    pub links: usize,
    /// Bytes of experts that the folder adds homes for.
    pub expert_bytes: u64,
}

impl Placement {
    /// The model's folder and these folders, as `--drive` names them.
    pub fn of(drives: impl IntoIterator<Item = PathBuf>) -> Self {
        let named = |path| NamedDrive {
            path,
            note: String::new(),
        };
        Self {
            drives: drives.into_iter().map(named).collect(),
            model_folder: true,
        }
    }

    /// Looks through the folders and says where each expert of the model lies.
    ///
    /// Shards and packs are compared with the model's own files, as far as their heads and a sample go. A fallback to buffered reads is added
    /// to `notices`.
    ///
    /// # Errors
    ///
    /// [`PlacementError::Copy`], [`PlacementError::OtherModel`], [`PlacementError::Pack`] for files that are not of this model or are damaged;
    /// [`PlacementError::EmptyDrive`]; [`PlacementError::NoHome`] names the experts that no drive holds.
    pub fn survey(&self, checkpoint: &Checkpoint, notices: &Notices) -> Result<Placed, PlacementError> {
        let mut survey = Survey::new(checkpoint, notices)?;
        let mut folders = Vec::new();
        if self.model_folder {
            folders.push(survey.folder(checkpoint.dir(), "")?);
        }
        for NamedDrive { path, note } in &self.drives {
            let report = survey.folder(path, note)?;
            if report.shards + report.packs + report.links == 0 {
                return Err(PlacementError::EmptyDrive { path: path.clone() });
            }
            folders.push(report);
        }
        survey.check_complete()?;
        Ok(Placed {
            layout: survey.builder.build()?,
            packs: survey.packs,
            folders,
        })
    }
}

/// The experts of a model, in ascending order.
fn experts(checkpoint: &Checkpoint) -> impl Iterator<Item = Result<(ExpertId, ExpertPlace), PlacementError>> {
    let config = checkpoint.config();
    let layers = (0..config.num_hidden_layers).filter(|&layer| config.is_moe(layer));
    layers.flat_map(move |layer| {
        (0..config.num_experts).map(move |expert| {
            let id = ExpertId {
                layer: layer as u32,
                expert: expert as u32,
            };
            Ok((id, checkpoint.expert(layer, expert)?))
        })
    })
}

/// The model's shards by name, and their identities, read when first asked for.
struct ModelShards<'a> {
    checkpoint: &'a Checkpoint,
    by_name: HashMap<String, usize>,
    identities: Vec<Option<(FileIdentity, u64)>>,
}

impl<'a> ModelShards<'a> {
    fn new(checkpoint: &'a Checkpoint) -> Self {
        let shards = checkpoint.shards();
        // A length of 0 stands for a shard that only a vision model needs and that is not there.
        let present = shards.iter().enumerate().filter(|(_, shard)| shard.len > 0);
        Self {
            checkpoint,
            by_name: present.map(|(number, shard)| (name_of(&shard.path), number)).collect(),
            identities: vec![None; shards.len()],
        }
    }

    fn path(&self, shard: usize) -> &'a Path {
        &self.checkpoint.shards()[shard].path
    }

    /// The identity of the model's shard, and the bytes in front of its data.
    fn identity(&mut self, shard: usize) -> Result<(FileIdentity, u64), PlacementError> {
        if let Some(known) = self.identities[shard] {
            return Ok(known);
        }
        let path = self.path(shard);
        let head_bytes = RawHeader::read(path)?.data_start();
        let known = (FileIdentity::read(path, head_bytes)?, head_bytes);
        self.identities[shard] = Some(known);
        Ok(known)
    }

    /// The record that packs keep of the model's shard.
    fn record(&mut self, shard: usize) -> Result<PackShard, PlacementError> {
        Ok(PackShard {
            name: name_of(self.path(shard)),
            identity: self.identity(shard)?.0,
        })
    }

    /// Refuses a file in the shard's name that is not a copy of it.
    fn check_copy(&mut self, shard: usize, path: &Path) -> Result<(), PlacementError> {
        let refuse = |(found, expected)| PlacementError::Copy {
            path: path.to_path_buf(),
            found,
            expected,
        };
        let expected = self.checkpoint.shards()[shard].len;
        let found = examine(path)?.len();
        if found != expected {
            return Err(refuse((
                format!("{found} bytes"),
                format!("{expected} as in the model's folder"),
            )));
        }
        let (model, head_bytes) = self.identity(shard)?;
        let copy = FileIdentity::read(path, head_bytes)?;
        copy.difference(&model)
            .map_or(Ok(()), |difference| Err(refuse(difference)))
    }
}

fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn examine(path: &Path) -> Result<std::fs::Metadata, PlacementError> {
    std::fs::metadata(path).map_err(|error| PlacementError::io(path, "examine", &error))
}

/// An expert, and which of its bytes have a home.
struct Expert {
    id: ExpertId,
    place: ExpertPlace,
    /// For each extent, the ranges that some home holds.
    held: Vec<Vec<Range<u64>>>,
}

impl Expert {
    fn is_complete(&self) -> bool {
        let extents = self.place.extents().iter().zip(&self.held);
        extents
            .into_iter()
            .all(|(extent, held)| covers(held.clone(), extent.len))
    }
}

/// Whether ranges leave no gap in `0..len`.
fn covers(mut ranges: Vec<Range<u64>>, len: u64) -> bool {
    ranges.sort_unstable_by_key(|range| range.start);
    let mut reached = 0;
    for range in ranges {
        if range.start > reached {
            return false;
        }
        reached = reached.max(range.end);
    }
    reached >= len
}

/// A look through folders, as far as it has come.
struct Survey<'a> {
    shards: ModelShards<'a>,
    notices: &'a Notices,
    builder: LayoutBuilder,
    experts: Vec<Expert>,
    number: HashMap<ExpertId, usize>,
    /// For each shard, the experts and extents in it.
    in_shard: Vec<Vec<(usize, usize)>>,
    /// Device and inode of each file that has homes.
    known: HashSet<(u64, u64)>,
    packs: Vec<PackIndex>,
}

impl<'a> Survey<'a> {
    fn new(checkpoint: &'a Checkpoint, notices: &'a Notices) -> Result<Self, PlacementError> {
        let mut survey = Self {
            shards: ModelShards::new(checkpoint),
            notices,
            builder: LayoutBuilder::new(),
            experts: Vec::new(),
            number: HashMap::new(),
            in_shard: vec![Vec::new(); checkpoint.shards().len()],
            known: HashSet::new(),
            packs: Vec::new(),
        };
        for expert in experts(checkpoint) {
            let (id, place) = expert?;
            let shape: Vec<Extent> = place
                .extents()
                .iter()
                .map(|extent| Extent {
                    page_offset: (extent.offset % drives::PAGE_BYTES as u64) as u16,
                    len: extent.len,
                })
                .collect();
            survey.builder.shape(id, &shape)?;
            let number = survey.experts.len();
            for (index, extent) in place.extents().iter().enumerate() {
                survey.in_shard[extent.shard].push((number, index));
            }
            survey.number.insert(id, number);
            survey.experts.push(Expert {
                id,
                place,
                held: vec![Vec::new(); shape.len()],
            });
        }
        Ok(survey)
    }

    fn folder(&mut self, path: &Path, note: &str) -> Result<FolderReport, PlacementError> {
        let failed = |error: std::io::Error| PlacementError::io(path, "list", &error);
        let mut names = Vec::new();
        for entry in std::fs::read_dir(path).map_err(failed)? {
            names.push(entry.map_err(failed)?.file_name().to_string_lossy().into_owned());
        }
        names.sort_unstable();
        let mut report = FolderReport {
            path: path.to_path_buf(),
            note: note.to_owned(),
            shards: 0,
            packs: 0,
            links: 0,
            expert_bytes: 0,
        };
        for name in names {
            let file = path.join(&name);
            let shard = self.shards.by_name.get(&name).copied();
            if shard.is_none() && !name.ends_with(PACK_SUFFIX) {
                continue;
            }
            let found = examine(&file)?;
            if !self.known.insert((found.dev(), found.ino())) {
                report.links += 1;
                continue;
            }
            report.expert_bytes += match shard {
                Some(shard) => self.shard(shard, &file)?,
                None => self.pack(&file)?,
            };
            report.shards += usize::from(shard.is_some());
            report.packs += usize::from(shard.is_none());
        }
        Ok(report)
    }

    /// Adds the homes of a shard or of a copy of one. Returns the bytes of its experts.
    fn shard(&mut self, shard: usize, path: &Path) -> Result<u64, PlacementError> {
        if path != self.shards.path(shard) {
            self.shards.check_copy(shard, path)?;
        }
        let mut bytes = 0;
        let mut file = None;
        for (expert, extent) in std::mem::take(&mut self.in_shard[shard]) {
            let file = match file {
                Some(file) => file,
                None => *file.insert(self.builder.file(path)?),
            };
            let place = self.experts[expert].place.extents()[extent];
            bytes += place.len;
            let home = Home {
                file,
                offset: place.offset,
                start: 0,
                len: place.len,
            };
            self.home(expert, extent, home)?;
            self.in_shard[shard].push((expert, extent));
        }
        Ok(bytes)
    }

    /// Adds the homes of a pack. Returns the bytes of its ranges.
    fn pack(&mut self, path: &Path) -> Result<u64, PlacementError> {
        let pack = PackIndex::open(path, self.notices)?;
        let refuse = |what: String, found: String, expected: String| PlacementError::OtherModel {
            path: path.to_path_buf(),
            what,
            found,
            expected,
        };
        let mut shards = Vec::new();
        for PackShard { name, identity } in pack.contents().shards() {
            let missing = || {
                refuse(
                    format!("shard {name}"),
                    "it".into(),
                    "only shards that the model has".into(),
                )
            };
            let number = self.shards.by_name.get(name).copied().ok_or_else(missing)?;
            let (model, _) = self.shards.identity(number)?;
            if let Some((found, expected)) = identity.difference(&model) {
                return Err(refuse(format!("made from another shard {name}"), found, expected));
            }
            shards.push(number);
        }
        let file: FileId = self.builder.file(path)?;
        for range in pack.contents().ranges() {
            let what = || format!("expert {} extent {}", range.expert, range.extent);
            let shard = shards[range.shard as usize];
            let number = self.number.get(&range.expert).copied();
            let place = number.and_then(|number| {
                let extents = self.experts[number].place.extents();
                Some((number, *extents.get(range.extent as usize)?))
            });
            let Some((expert, extent)) = place else {
                return Err(refuse(what(), "it".into(), "only experts that the model has".into()));
            };
            let (found, expected) = (
                (shard, range.extent_offset, range.extent_len),
                (extent.shard, extent.offset, extent.len),
            );
            if found != expected {
                let text = |(shard, offset, len): (usize, u64, u64)| {
                    format!("{len} bytes at offset {offset} of {}", name_of(self.shards.path(shard)))
                };
                return Err(refuse(what(), text(found), text(expected)));
            }
            self.home(expert, range.extent as usize, range.home(file))?;
        }
        let bytes = pack.contents().expert_bytes();
        self.packs.push(pack);
        Ok(bytes)
    }

    fn home(&mut self, expert: usize, extent: usize, home: Home) -> Result<(), PlacementError> {
        let expert = &mut self.experts[expert];
        expert.held[extent].push(home.start..home.start + home.len);
        Ok(self.builder.home(expert.id, extent, home)?)
    }

    /// Names the experts that have bytes without a home.
    fn check_complete(&self) -> Result<(), PlacementError> {
        let homeless: Vec<String> = self
            .experts
            .iter()
            .filter(|expert| !expert.is_complete())
            .map(|expert| expert.id.to_string())
            .collect();
        if homeless.is_empty() {
            return Ok(());
        }
        Err(PlacementError::NoHome {
            count: homeless.len(),
            all: self.experts.len(),
            first: first_few(&homeless),
        })
    }
}

/// The first of a list, for a message.
fn first_few(names: &[String]) -> String {
    let shown = names[..names.len().min(NAMED)].join(", ");
    match names.len().saturating_sub(NAMED) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}
