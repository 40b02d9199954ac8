//! Writing the packs of a plan.

use super::{ModelShards, PlacePlan, PlacementError, covers, experts, first_few};
use checkpoint::{Checkpoint, ExpertPlace};
use drives::{
    CHECKSUM_CHUNK_BYTES, ExpertId, Notices, PACK_SUFFIX, PackContents, PackError, PackIndex, PackPhase, PackRange,
    free_bytes, sweep_partials, write_pack,
};
use std::collections::{BTreeMap, HashMap};
use std::ops::{ControlFlow, Range};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Settings of [`place`].
#[derive(Debug, Clone)]
pub struct PlaceOptions {
    /// Refuse a plan that leaves some byte of an expert in no pack.
    pub only_packs: bool,
    /// Bytes of a checksum chunk: a multiple of the page size.
    pub chunk_bytes: u32,
}

impl Default for PlaceOptions {
    fn default() -> Self {
        Self {
            only_packs: false,
            chunk_bytes: CHECKSUM_CHUNK_BYTES,
        }
    }
}

/// How far [`place`] has come.
#[derive(Debug, Clone, Copy)]
pub struct PlaceProgress<'a> {
    /// The pack in work.
    pub pack: &'a Path,
    /// Bytes of experts written so far, over all packs.
    pub written: u64,
    /// Bytes of experts read back and found right so far.
    pub verified: u64,
    /// Bytes of experts to write and to verify.
    pub total: u64,
}

/// What [`place`] did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PlaceReport {
    /// Packs that were written and verified.
    pub written: Vec<PathBuf>,
    /// Packs of this plan that were there already; their data was not read.
    pub kept: Vec<PathBuf>,
    /// Bytes of experts written.
    pub bytes: u64,
}

/// A pack that the plan asks for.
struct Job {
    folder: PathBuf,
    path: PathBuf,
    contents: PackContents,
    sources: Vec<PathBuf>,
}

/// Writes the packs of a plan, one for each drive and layer, from the shards in the model's folder. Each is read back and compared before
/// it gets its name.
///
/// Everything that can be known beforehand is checked before anything is written. Packs that are there already are kept, so a run that was
/// stopped or killed can be repeated. `progress` ends the run by breaking.
///
/// # Errors
///
/// [`PlacementError::Plan`] when the plan does not fit the model or gives one folder the same bytes twice; [`PlacementError::NoSpace`];
/// [`PlacementError::NoHome`] with [`only_packs`](PlaceOptions::only_packs); [`PlacementError::Pack`] when reading or writing fails.
pub fn place(
    checkpoint: &Checkpoint,
    plan: &PlacePlan,
    options: &PlaceOptions,
    notices: &Notices,
    progress: &mut dyn FnMut(PlaceProgress<'_>) -> ControlFlow<()>,
) -> Result<PlaceReport, PlacementError> {
    let jobs = jobs(checkpoint, plan, options)?;
    if options.only_packs {
        check_complete(checkpoint, &jobs)?;
    }
    let mut report = PlaceReport::default();
    let mut to_write = Vec::new();
    for job in jobs {
        if is_there(&job, notices)? {
            report.kept.push(job.path);
        } else {
            to_write.push(job);
        }
    }
    check_space(&to_write)?;
    let total = to_write.iter().map(|job| job.contents.expert_bytes()).sum();
    for job in to_write {
        let done = report.bytes;
        let mut of_pack = |at: drives::PackProgress| {
            let (written, verified) = match at.phase {
                PackPhase::Write => (at.bytes, 0),
                PackPhase::Verify => (at.total, at.bytes),
            };
            progress(PlaceProgress {
                pack: &job.path,
                written: done + written,
                verified: done + verified,
                total,
            })
        };
        write_pack(&job.path, &job.contents, &job.sources, notices, &mut of_pack)?;
        report.bytes += job.contents.expert_bytes();
        report.written.push(job.path);
    }
    Ok(report)
}

fn jobs(checkpoint: &Checkpoint, plan: &PlacePlan, options: &PlaceOptions) -> Result<Vec<Job>, PlacementError> {
    let mut ranges: BTreeMap<(PathBuf, u32), Vec<(PackRange, usize)>> = BTreeMap::new();
    for (number, line) in plan.lines.iter().enumerate() {
        let wrong = |where_: String, found: String, expected: String| PlacementError::Plan {
            path: line.drive.clone(),
            where_,
            found,
            expected,
        };
        let folder = std::fs::canonicalize(&line.drive)
            .map_err(|error| PlacementError::io(&line.drive, "open the drive's folder", &error))?;
        if !folder.is_dir() {
            let place = format!("plan line {}", number + 1);
            return Err(wrong(place, "a file".into(), "the folder of a drive".into()));
        }
        let config = checkpoint.config();
        let (layer, count) = (line.layer, config.num_experts as u32);
        if layer as usize >= config.num_hidden_layers || !config.is_moe(layer as usize) {
            let expected = format!(
                "a layer with experts, from {} to {}",
                config.first_k_dense_replace,
                config.num_hidden_layers - 1
            );
            return Err(wrong(
                format!("plan line {}", number + 1),
                format!("layer {layer}"),
                expected,
            ));
        }
        let numbers = line.experts.numbers(count).map_err(|expert| {
            let expected = format!("at most {}", count - 1);
            wrong(
                format!("plan line {}", number + 1),
                format!("expert {expert}"),
                expected,
            )
        })?;
        let of_pack = ranges.entry((folder, layer)).or_default();
        for expert in numbers {
            let place = checkpoint.expert(layer as usize, expert as usize)?;
            let parts = line.part.ranges(&place, options.chunk_bytes).ok_or_else(|| {
                let found = format!("a part of expert {layer}/{expert} that ends beyond it");
                wrong(
                    format!("plan line {}", number + 1),
                    found,
                    format!("at most {} bytes", place.bytes()),
                )
            })?;
            of_pack.extend(pack_ranges(ExpertId { layer, expert }, &place, &parts));
        }
    }
    let mut shards = ModelShards::new(checkpoint);
    let mut jobs = Vec::new();
    for ((folder, layer), ranges) in ranges {
        if !ranges.is_empty() {
            jobs.push(job(folder, layer, ranges, options.chunk_bytes, &mut shards)?);
        }
    }
    Ok(jobs)
}

/// The ranges of one expert that are not empty, each with the number of its shard.
fn pack_ranges<'a>(
    expert: ExpertId,
    place: &'a ExpertPlace,
    parts: &'a [Range<u64>],
) -> impl Iterator<Item = (PackRange, usize)> + 'a {
    let extents = place.extents().iter().zip(parts).enumerate();
    extents
        .filter(|(_, (_, part))| !part.is_empty())
        .map(move |(index, (extent, part))| {
            let range = PackRange {
                expert,
                extent: index as u32,
                shard: 0,
                extent_offset: extent.offset,
                extent_len: extent.len,
                start: part.start,
                len: part.end - part.start,
                offset: 0,
            };
            (range, extent.shard)
        })
}

fn job(
    folder: PathBuf,
    layer: u32,
    ranges: Vec<(PackRange, usize)>,
    chunk_bytes: u32,
    shards: &mut ModelShards<'_>,
) -> Result<Job, PlacementError> {
    let mut used: Vec<usize> = ranges.iter().map(|(_, shard)| *shard).collect();
    used.sort_unstable();
    used.dedup();
    let ranges = ranges.into_iter().map(|(range, shard)| PackRange {
        shard: used.partition_point(|&other| other < shard) as u32,
        ..range
    });
    let records = used
        .iter()
        .map(|&shard| shards.record(shard))
        .collect::<Result<_, _>>()?;
    let contents = PackContents::new(chunk_bytes, records, ranges.collect()).map_err(|error| match error {
        PackError::Contents { problem } => PlacementError::Plan {
            path: folder.clone(),
            where_: format!("layer {layer}"),
            found: problem,
            expected: "each byte of an expert at most once in a folder".into(),
        },
        other => other.into(),
    })?;
    let name = format!("layer-{layer:05}-{:08x}{PACK_SUFFIX}", contents.fingerprint());
    Ok(Job {
        path: folder.join(name),
        folder,
        contents,
        sources: used.iter().map(|&shard| shards.path(shard).to_path_buf()).collect(),
    })
}

/// Whether the pack is there already, as the plan wants it.
fn is_there(job: &Job, notices: &Notices) -> Result<bool, PlacementError> {
    if !job.path.exists() {
        return Ok(false);
    }
    let found = PackIndex::open(&job.path, notices)?;
    if found.contents() == &job.contents {
        return Ok(true);
    }
    Err(PlacementError::Pack(PackError::Malformed {
        path: job.path.clone(),
        found: "a pack with other contents".into(),
        expected: "what its name stands for".into(),
    }))
}

/// Removes what killed runs left, then compares what the packs need with what their devices have.
fn check_space(jobs: &[Job]) -> Result<(), PlacementError> {
    let mut needs: HashMap<u64, (&Path, u64)> = HashMap::new();
    for job in jobs {
        sweep_partials(&job.folder)?;
        let found = std::fs::metadata(&job.folder);
        let device = found
            .map_err(|error| PlacementError::io(&job.folder, "examine", &error))?
            .dev();
        let (_, needed) = needs.entry(device).or_insert((&job.folder, 0));
        *needed += job.contents.file_len();
    }
    for (folder, needed) in needs.into_values() {
        let free = free_bytes(folder).map_err(|error| PlacementError::io(folder, "ask for free space", &error))?;
        if free < needed {
            return Err(PlacementError::NoSpace {
                path: folder.to_path_buf(),
                needed,
                free,
            });
        }
    }
    Ok(())
}

/// Refuses packs that, alone, do not hold the whole of every expert.
fn check_complete(checkpoint: &Checkpoint, jobs: &[Job]) -> Result<(), PlacementError> {
    let mut held: HashMap<(ExpertId, u32), Vec<Range<u64>>> = HashMap::new();
    for range in jobs.iter().flat_map(|job| job.contents.ranges()) {
        let ranges = held.entry((range.expert, range.extent)).or_default();
        ranges.push(range.start..range.start + range.len);
    }
    let (mut all, mut homeless) = (0, Vec::new());
    for expert in experts(checkpoint) {
        let (id, place) = expert?;
        all += 1;
        let complete = place.extents().iter().enumerate().all(|(index, extent)| {
            let ranges = held.remove(&(id, index as u32)).unwrap_or_default();
            covers(ranges, extent.len)
        });
        if !complete {
            homeless.push(id.to_string());
        }
    }
    if homeless.is_empty() {
        return Ok(());
    }
    Err(PlacementError::NoHome {
        count: homeless.len(),
        all,
        first: first_few(&homeless),
    })
}
