//! The one pass over a checkpoint's folder that both opening and surveying use.
//!
//! It reads the configuration, the index and every shard's header, places each tensor, and goes on after a problem, so
//! that what is wrong is known whole. Tensor data is never read.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::config::K3Config;
use crate::error::Error;
use crate::generation::stop_ids;
use crate::index::{INDEX_FILE, Index, MAX_SHARDS, numbered_set, read_index};
use crate::places::ExpertTable;
use crate::safetensors::{Dtype, HeaderEntry, RawHeader, Shape};
use crate::schema::{ExpertPart, Schema, Slot, TEXT_PREFIX};

/// The most problems kept with their text; beyond it they are counted.
const MAX_LISTED: usize = 1000;

/// Where a tensor of the trunk lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorInfo {
    /// Type of the elements.
    pub dtype: Dtype,
    /// Dimensions, outermost first.
    pub shape: Shape,
    /// Place of the shard in [`Checkpoint::shards`](crate::Checkpoint::shards).
    pub shard: usize,
    /// First byte in the file.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// The state of one shard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardReport {
    /// The file.
    pub path: PathBuf,
    /// Its length in bytes, or `None` if it is missing or cannot be looked at.
    pub found: Option<u64>,
    /// The length that its header implies, or `None` if the header cannot be had.
    pub expected: Option<u64>,
    /// Bytes of its tensors: from its header, or else from the index, where the configuration is known.
    pub tensor_bytes: Option<u64>,
    /// Its tensors, from its header, or else from the index.
    pub tensors: u64,
    /// Whether it holds anything that a text model needs. Shards of vision tensors alone are not needed.
    pub needed: bool,
}

impl ShardReport {
    /// Whether the file is there with the length that its header implies.
    pub fn is_complete(&self) -> bool {
        self.found.is_some() && self.found == self.expected
    }
}

/// The problems met: the first ones in full, all of them counted.
#[derive(Debug, Default)]
pub(crate) struct Problems {
    pub(crate) listed: Vec<Error>,
    pub(crate) total: u64,
}

impl Problems {
    fn push(&mut self, problem: Error) {
        self.total += 1;
        if self.listed.len() < MAX_LISTED {
            self.listed.push(problem);
        }
    }

    fn note<T>(&mut self, result: Result<T, Error>) -> Option<T> {
        result.map_err(|problem| self.push(problem)).ok()
    }
}

/// What the pass found.
#[derive(Debug, Default)]
pub(crate) struct Scan {
    pub(crate) dir: PathBuf,
    pub(crate) config: Option<K3Config>,
    pub(crate) schema: Option<Schema>,
    pub(crate) stop_ids: Vec<u32>,
    /// `metadata.total_size` of the index.
    pub(crate) total_size: Option<u64>,
    pub(crate) shards: Vec<ShardReport>,
    /// As [`Schema::trunk`].
    pub(crate) trunk: Vec<Option<TensorInfo>>,
    pub(crate) experts: ExpertTable,
    pub(crate) problems: Problems,
    /// Tensors in the headers read.
    pub(crate) tensors_by_dtype: BTreeMap<Dtype, u64>,
    /// Bytes of vision tensors in the headers read.
    pub(crate) vision_bytes: u64,
    /// Whether a plain expert has been reported.
    plain_expert: bool,
}

/// Looks through `dir`. An error means that there was nothing to look through.
pub(crate) fn scan(dir: &Path) -> Result<Scan, Error> {
    let files = shard_files(dir)?;
    let config_path = dir.join("config.json");
    let index_path = dir.join(INDEX_FILE);
    let has_index = index_path.exists();
    if files.is_empty() && !has_index && !config_path.exists() {
        return Err(Error::NotACheckpoint { path: dir.to_owned() });
    }
    let mut scan = Scan {
        dir: dir.to_owned(),
        ..Scan::default()
    };
    scan.config = scan.problems.note(K3Config::read(&config_path));
    if let Some(config) = &scan.config {
        let schema = Schema::new(config);
        let part_bytes = ExpertPart::ALL.map(|part| schema.expert_part_bytes(part));
        scan.experts = ExpertTable::new(schema.expert_count(), part_bytes);
        scan.trunk = vec![None; schema.trunk().len()];
        scan.schema = Some(schema);
        scan.stop_ids = scan.problems.note(stop_ids(dir, config)).unwrap_or_default();
    }
    let mut promises = None;
    if has_index {
        let read = Promises::read(&index_path, scan.schema.as_ref());
        promises = scan.problems.note(read);
    }
    let (names, named_by) = match &promises {
        Some(promises) => (promises.shards.clone(), "the index"),
        None => (complete_by_number(files), "the numbering of the other shards"),
    };
    if names.len() > MAX_SHARDS {
        return Err(Error::Json {
            path: dir.to_owned(),
            found: format!("{} shards", names.len()),
            expected: "at most 65,534 of them",
        });
    }
    scan.total_size = promises.as_ref().and_then(|promises| promises.total_size);
    for (number, name) in names.iter().enumerate() {
        scan.read_shard(number as u16, &dir.join(name), named_by, promises.as_ref());
    }
    scan.report_missing_tensors(promises.as_ref());
    Ok(scan)
}

/// The `.safetensors` files of a folder, sorted by name.
fn shard_files(dir: &Path) -> Result<Vec<String>, Error> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(|e| Error::io(dir, "open", e))? {
        let entry = entry.map_err(|e| Error::io(dir, "read", e))?;
        if let Ok(name) = entry.file_name().into_string()
            && name.ends_with(".safetensors")
        {
            names.push(name);
        }
    }
    names.sort_unstable();
    Ok(names)
}

/// Adds the shards that the numbers in the names of the others call for.
fn complete_by_number(mut names: Vec<String>) -> Vec<String> {
    if let Some(set) = names.first().and_then(|name| numbered_set(name)) {
        names.extend(set);
        names.sort_unstable();
        names.dedup();
    }
    names
}

/// What the index says about the tensors of the schema.
struct Promises {
    total_size: Option<u64>,
    /// Shard file names, sorted.
    shards: Vec<String>,
    /// As [`Schema::trunk`]: number of the shard.
    trunk: Vec<Option<u16>>,
    experts: ExpertTable,
    /// Per shard: tensors, bytes of the text model's tensors, and whether it holds any.
    contents: Vec<(u64, u64, bool)>,
}

impl Promises {
    fn read(path: &Path, schema: Option<&Schema>) -> Result<Promises, Error> {
        let mut trunk = vec![None; schema.map_or(0, |schema| schema.trunk().len())];
        let part_bytes = ExpertPart::ALL.map(|part| schema.map_or(0, |schema| schema.expert_part_bytes(part)));
        let mut experts = ExpertTable::new(schema.map_or(0, Schema::expert_count), part_bytes);
        let mut contents = Vec::new();
        let index = read_index(path, &mut |name, shard| {
            if contents.len() <= usize::from(shard) {
                contents.resize(usize::from(shard) + 1, (0, 0, false));
            }
            let (tensors, bytes, needed) = &mut contents[usize::from(shard)];
            *tensors += 1;
            match schema.map_or(Slot::Unknown, |schema| schema.resolve(name)) {
                Slot::Trunk(place) => {
                    *bytes += schema.map_or(0, |schema| schema.trunk()[place].bytes());
                    trunk[place] = Some(shard);
                }
                Slot::Expert { expert, part } => {
                    *bytes += part_bytes[part as usize];
                    experts.set(expert, part, shard, 0);
                }
                Slot::Vision => return,
                Slot::PlainExpert | Slot::Unknown => {}
            }
            *needed = true;
        })?;
        Ok(Promises {
            total_size: None,
            shards: Vec::new(),
            trunk,
            experts,
            contents,
        }
        .sorted(index))
    }

    /// Renumbers the shards from the order of mention to the order of their names.
    fn sorted(mut self, index: Index) -> Promises {
        let mut order: Vec<usize> = (0..index.shards.len()).collect();
        order.sort_unstable_by_key(|&shard| &index.shards[shard]);
        let mut number = vec![0; order.len()];
        for (new, &old) in order.iter().enumerate() {
            number[old] = new as u16;
        }
        for shard in self.trunk.iter_mut().flatten() {
            *shard = number[usize::from(*shard)];
        }
        for expert in 0..self.experts.len() {
            for part in ExpertPart::ALL {
                if let Some(shard) = self.experts.shard(expert, part) {
                    self.experts.set(expert, part, number[usize::from(shard)], 0);
                }
            }
        }
        self.contents = order.iter().map(|&old| self.contents[old]).collect();
        self.shards = order.iter().map(|&old| index.shards[old].clone()).collect();
        self.total_size = index.total_size;
        self
    }

    /// The shard that the index gives a tensor; `None` also for tensors that the schema does not know.
    fn shard(&self, slot: Slot) -> Option<u16> {
        match slot {
            Slot::Trunk(place) => self.trunk[place],
            Slot::Expert { expert, part } => self.experts.shard(expert, part),
            _ => None,
        }
    }
}

impl Scan {
    /// Reads one header and places its tensors.
    fn read_shard(&mut self, number: u16, path: &Path, named_by: &'static str, promises: Option<&Promises>) {
        let promised = promises.map(|promises| promises.contents[usize::from(number)]);
        let (tensors, bytes, needed) = promised.unwrap_or((0, 0, true));
        let known_bytes = promised.and(self.schema.as_ref()).map(|_| bytes);
        let mut report = ShardReport {
            path: path.to_owned(),
            found: None,
            expected: None,
            tensor_bytes: known_bytes,
            tensors,
            needed,
        };
        match self.read_header(number, path, promises, &mut report) {
            Ok(()) => {}
            Err(_) if !report.needed => {}
            Err(Error::Io { source, .. }) if source.kind() == ErrorKind::NotFound => {
                self.problems.push(Error::MissingShard {
                    path: path.to_owned(),
                    named_by,
                });
            }
            Err(problem) => self.problems.push(problem),
        }
        self.shards.push(report);
    }

    fn read_header(
        &mut self,
        number: u16,
        path: &Path,
        promises: Option<&Promises>,
        report: &mut ShardReport,
    ) -> Result<(), Error> {
        report.found = std::fs::metadata(path)
            .ok()
            .filter(|meta| meta.is_file())
            .map(|meta| meta.len());
        let header = RawHeader::read(path)?;
        report.found = Some(header.file_len());
        let entries = header.entries()?;
        let tensor_bytes = entries.last().map_or(0, |last| last.end);
        report.expected = Some(header.data_start() + tensor_bytes);
        report.tensor_bytes = Some(tensor_bytes);
        report.tensors = entries.len() as u64;
        report.needed = false;
        for entry in &entries {
            *self.tensors_by_dtype.entry(entry.dtype).or_default() += 1;
            let slot = self
                .schema
                .as_ref()
                .map_or(Slot::Unknown, |schema| schema.resolve(&entry.name));
            if slot == Slot::Vision {
                self.vision_bytes += entry.end - entry.begin;
                continue;
            }
            report.needed = true;
            if self.schema.is_some() {
                let placed = self.place(slot, entry, number, path, header.data_start(), promises);
                self.problems.note(placed);
            }
        }
        header.check_len(&entries)
    }

    /// Checks one tensor against schema, index and the tensors before it, and records where it is.
    fn place(
        &mut self,
        slot: Slot,
        entry: &HeaderEntry<'_>,
        number: u16,
        path: &Path,
        data_start: u64,
        promises: Option<&Promises>,
    ) -> Result<(), Error> {
        let Some(schema) = &self.schema else {
            return Ok(());
        };
        let path = || path.to_owned();
        let tensor = || entry.name.to_string();
        let (dtype, shape, accepted, before) = match slot {
            Slot::Vision => return Ok(()),
            Slot::Unknown => {
                return Err(Error::UnexpectedTensor {
                    path: path(),
                    tensor: tensor(),
                });
            }
            Slot::PlainExpert => {
                // One report stands for the thousands like it.
                let first = !std::mem::replace(&mut self.plain_expert, true);
                return if first {
                    Err(Error::PlainExpert {
                        path: path(),
                        tensor: tensor(),
                    })
                } else {
                    Ok(())
                };
            }
            Slot::Trunk(place) => {
                let spec = &schema.trunk()[place];
                let before = self.trunk[place].map(|info| info.shard);
                (spec.dtype, spec.shape, spec.accepts(&entry.shape), before)
            }
            Slot::Expert { expert, part } => {
                let shape = schema.expert_shape(part);
                let before = self.experts.shard(expert, part).map(usize::from);
                (Dtype::U8, shape, shape == entry.shape, before)
            }
        };
        if let Some(before) = before {
            let first = self.shards.get(before).and_then(|shard| shard.path.file_name());
            let first = first.unwrap_or_default().to_string_lossy().into_owned();
            return Err(Error::TensorTwice {
                path: path(),
                tensor: tensor(),
                first,
            });
        }
        // Recorded even when it is wrong, so that it is not also reported missing.
        let offset = data_start + entry.begin;
        match slot {
            Slot::Trunk(place) => {
                let (shard, len) = (usize::from(number), entry.end - entry.begin);
                self.trunk[place] = Some(TensorInfo {
                    dtype: entry.dtype,
                    shape: entry.shape,
                    shard,
                    offset,
                    len,
                });
            }
            Slot::Expert { expert, part } => self.experts.set(expert, part, number, offset),
            _ => {}
        }
        if entry.dtype != dtype {
            return Err(Error::WrongDtype {
                path: path(),
                tensor: tensor(),
                found: entry.dtype,
                expected: dtype,
            });
        }
        if !accepted {
            let (found, expected) = (entry.shape.to_string(), shape.to_string());
            return Err(Error::WrongShape {
                path: path(),
                tensor: tensor(),
                found,
                expected,
            });
        }
        if let Some(promises) = promises
            && promises.shard(slot) != Some(number)
        {
            let promised = promises
                .shard(slot)
                .map(|shard| promises.shards[usize::from(shard)].clone());
            let expected = promised.unwrap_or_else(|| "no shard".to_owned());
            return Err(Error::WrongShard {
                path: path(),
                tensor: tensor(),
                expected,
            });
        }
        Ok(())
    }

    /// Reports the tensors that no header has, unless a shard that is itself reported should hold them.
    fn report_missing_tensors(&mut self, promises: Option<&Promises>) {
        let Some(schema) = &self.schema else { return };
        let has_header = |shard: &ShardReport| shard.expected.is_some();
        let all_headers = self.shards.iter().all(has_header);
        let mut report = |slot, name: &dyn Fn() -> String| match promises {
            Some(promises) => match promises.shard(slot) {
                None => self.problems.push(Error::MissingTensor {
                    path: self.dir.join(INDEX_FILE),
                    tensor: name(),
                    place: "in the index's weight_map",
                }),
                Some(shard) if has_header(&self.shards[usize::from(shard)]) => {
                    self.problems.push(Error::MissingTensor {
                        path: self.shards[usize::from(shard)].path.clone(),
                        tensor: name(),
                        place: "there, as the index says",
                    });
                }
                Some(_) => {}
            },
            None if all_headers => self.problems.push(Error::MissingTensor {
                path: self.dir.clone(),
                tensor: name(),
                place: "in one of the shards",
            }),
            None => {}
        };
        for (place, spec) in schema.trunk().iter().enumerate() {
            if self.trunk[place].is_none() {
                report(Slot::Trunk(place), &|| format!("{TEXT_PREFIX}{}", spec.name));
            }
        }
        if self.plain_expert {
            return;
        }
        for expert in 0..self.experts.len() {
            for part in ExpertPart::ALL {
                if self.experts.shard(expert, part).is_none() {
                    report(Slot::Expert { expert, part }, &|| {
                        let (layer, expert) = schema.expert_at(expert);
                        format!(
                            "{TEXT_PREFIX}{}",
                            crate::schema::expert_tensor_name(layer, expert, part)
                        )
                    });
                }
            }
        }
    }
}
