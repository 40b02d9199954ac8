//! The resident weights: as published, or converted once to row-int8 and kept in a file that `docs/trunk.md` draws.

mod convert;
mod error;
mod file;
mod format;

pub use error::TrunkError;
pub(crate) use file::{Kept, Making, TrunkFile};

use checkpoint::{Class, Dtype, TensorSpec};
use std::fmt;
use std::path::PathBuf;

/// What every result says that comes from other weights than the published ones.
pub const NOT_WEIGHT_EXACT: &str = "not weight-exact";

/// End of the name of a file with a converted trunk.
pub const TRUNK_SUFFIX: &str = ".trunk";

/// How the resident matrices are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TrunkFormat {
    /// As published.
    #[default]
    Bf16,
    /// Integers of 8 bits with a scale for each row: about half the bytes, and other results.
    Int8,
}

impl TrunkFormat {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Bf16, Self::Int8];

    /// As the command line has it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::Int8 => "int8",
        }
    }

    /// Whether results are those of the published weights.
    pub fn is_exact(self) -> bool {
        self == Self::Bf16
    }

    /// As results have it: the name, and [`NOT_WEIGHT_EXACT`] where that is so.
    pub fn label(self) -> String {
        match self.is_exact() {
            true => self.name().to_owned(),
            false => format!("{}, {NOT_WEIGHT_EXACT}", self.name()),
        }
    }
}

impl fmt::Display for TrunkFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Which resident weights to load.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Trunk {
    /// The published ones.
    #[default]
    Published,
    /// Row-int8, from a file in `folder` (`None`: there is no place for one, which is an error). It is written first where it is
    /// missing, damaged, or made of another model; several processes may ask for it at once.
    Int8 {
        /// Where files with converted trunks are kept; made if need be.
        folder: Option<PathBuf>,
    },
}

impl Trunk {
    /// How its matrices are stored.
    pub fn format(&self) -> TrunkFormat {
        match self {
            Self::Published => TrunkFormat::Bf16,
            Self::Int8 { .. } => TrunkFormat::Int8,
        }
    }
}

/// What opening an engine is busy with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadPhase {
    /// Another process converts the trunk; it is waited for.
    Wait,
    /// The trunk is converted. Bytes are those of the published weights.
    Convert,
    /// The resident weights are read. Bytes are those in memory.
    Load,
}

/// How far opening an engine is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadProgress {
    /// What is being done.
    pub phase: LoadPhase,
    /// Bytes done in this phase.
    pub done: u64,
    /// All bytes of this phase.
    pub of: u64,
}

/// Whether an int8 trunk holds this tensor as int8.
///
/// All matrices are but two kinds. The router decides which experts run, and every wrong choice is a whole expert's difference; it
/// is a hundredth of the trunk. `kv_b_proj` works on the cached latents in both directions, where the order of its sums is that of bf16
/// (docs/numerics.md, section 6). The embedding is never resident. What is no matrix, such as norms and residual vectors, stays
/// as it is.
pub(crate) fn is_converted(spec: &TensorSpec) -> bool {
    let is_matrix = matches!(spec.shape.dims(), [rows, _] if *rows > 1);
    let kept = matches!(spec.class, Class::Embedding | Class::Router) || spec.name.ends_with(".kv_b_proj.weight");
    is_matrix && spec.dtype == Dtype::Bf16 && !kept
}

/// Bytes of a converted matrix: its integers, and an f32 scale for each row.
pub(crate) fn int8_bytes(rows: u64, cols: u64) -> u64 {
    rows * (cols + size_of::<f32>() as u64)
}
