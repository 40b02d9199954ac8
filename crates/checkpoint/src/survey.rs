//! A report on a checkpoint's folder that goes on after a problem: what it holds, what is missing.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::config::K3Config;
use crate::error::Error;
use crate::safetensors::Dtype;
use crate::scan::{Scan, ShardReport, scan};
use crate::schema::{Schema, Sizes};

/// What a folder holds of a checkpoint, and everything that is wrong with it.
#[derive(Debug)]
pub struct Survey {
    /// The folder.
    pub dir: PathBuf,
    /// The configuration, unless `config.json` is among the problems.
    pub config: Option<K3Config>,
    /// Bytes by class, from the configuration: what a complete checkpoint holds.
    pub sizes: Option<Sizes>,
    /// Every shard that the index names (without an index: that the folder holds or its numbering calls for).
    pub shards: Vec<ShardReport>,
    /// The problems in the order met; past a thousand they are only counted.
    pub problems: Vec<Error>,
    /// The number of problems.
    pub problem_count: u64,
    /// Tensors in the headers that could be read, vision included.
    pub tensors_by_dtype: BTreeMap<Dtype, u64>,
    /// Bytes of the vision tensors met, which a text model skips.
    pub vision_bytes: u64,
    /// Bytes still to be downloaded for the text model; the headers of shards that are missing whole come on top.
    pub bytes_to_come: u64,
    /// Routed experts whose six tensors were all found.
    pub experts_found: usize,
    /// Those among them that are one extent, which is one read.
    pub experts_contiguous: usize,
}

impl Survey {
    /// Tensors in the headers that could be read.
    pub fn tensors(&self) -> u64 {
        self.tensors_by_dtype.values().sum()
    }

    /// Shards that are there with the length that their header implies.
    pub fn shards_complete(&self) -> usize {
        self.shards.iter().filter(|shard| shard.is_complete()).count()
    }
}

/// Surveys the checkpoint in `dir`; problems are part of the answer.
///
/// # Errors
///
/// `dir` cannot be listed, or holds nothing of a checkpoint at all.
pub fn survey(dir: &Path) -> Result<Survey, Error> {
    let scan = scan(dir)?;
    let (mut experts_found, mut experts_contiguous) = (0, 0);
    for place in (0..scan.experts.len()).filter_map(|expert| scan.experts.place(expert)) {
        experts_found += 1;
        experts_contiguous += usize::from(place.extents().len() == 1);
    }
    Ok(Survey {
        bytes_to_come: bytes_to_come(&scan),
        dir: scan.dir,
        config: scan.config,
        sizes: scan.schema.as_ref().map(Schema::sizes),
        shards: scan.shards,
        problems: scan.problems.listed,
        problem_count: scan.problems.total,
        tensors_by_dtype: scan.tensors_by_dtype,
        vision_bytes: scan.vision_bytes,
        experts_found,
        experts_contiguous,
    })
}

/// Bytes that the needed shards still lack.
fn bytes_to_come(scan: &Scan) -> u64 {
    let mut lacking = 0;
    // Shards whose contents are known to nobody: their part is what remains of the total.
    let (mut known, mut unknown_shards, mut unknown_found) = (0, 0, 0);
    for shard in &scan.shards {
        let found = shard.found.unwrap_or(0);
        match (shard.expected, shard.tensor_bytes) {
            (Some(expected), Some(bytes)) => {
                known += bytes;
                lacking += if shard.needed {
                    expected.saturating_sub(found)
                } else {
                    0
                };
            }
            (None, Some(bytes)) => {
                known += bytes;
                lacking += if shard.needed { bytes.saturating_sub(found) } else { 0 };
            }
            (_, None) => {
                unknown_shards += 1;
                unknown_found += found;
            }
        }
    }
    let of_text = scan
        .schema
        .as_ref()
        .map(|schema| schema.sizes().trunk() + schema.sizes().experts);
    let total = scan.total_size.or(of_text.map(|bytes| bytes + scan.vision_bytes));
    match total {
        Some(total) if unknown_shards > 0 => lacking + total.saturating_sub(known + unknown_found),
        _ => lacking,
    }
}
