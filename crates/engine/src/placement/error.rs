//! What can be wrong with drives, layout files and plans.

use drives::ExpertId;
use std::path::{Path, PathBuf};

/// A problem with where experts lie or shall lie. One line: where, what was found, what was expected, what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlacementError {
    /// The checkpoint does not give what was asked.
    #[error(transparent)]
    Checkpoint(#[from] checkpoint::Error),
    /// A file cannot be read, or the homes contradict each other.
    #[error(transparent)]
    Drives(#[from] drives::Error),
    /// A pack cannot be read or written.
    #[error(transparent)]
    Pack(#[from] drives::PackError),
    /// The operating system refused an operation.
    #[error("{}: cannot {action}: {reason}; check that the drive is mounted and that you may use the path", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What was tried, as a verb.
        action: &'static str,
        /// The operating system's reason.
        reason: String,
    },
    /// A layout file that does not say what it should.
    #[error("{}: found {found}, expected {expected}; correct the layout file (docs/layout.md shows one)", path.display())]
    LayoutFile {
        /// The file.
        path: PathBuf,
        /// What was found.
        found: String,
        /// What was expected.
        expected: String,
    },
    /// A plan that cannot be carried out.
    #[error("{}: {where_}: found {found}, expected {expected}; correct the plan", path.display())]
    Plan {
        /// The plan's file, or the folder that it is about.
        path: PathBuf,
        /// Line or expert.
        where_: String,
        /// What was found.
        found: String,
        /// What was expected.
        expected: String,
    },
    /// A folder without anything of the model.
    #[error(
        "{}: found neither a shard of this model nor a pack, expected a drive's folder; check the path and that the drive is mounted",
        path.display()
    )]
    EmptyDrive {
        /// The folder.
        path: PathBuf,
    },
    /// A file that bears the name of a shard and is not that shard.
    #[error("{}: found {found}, expected {expected}; copy the shard again, or take it out of this folder", path.display())]
    Copy {
        /// The file.
        path: PathBuf,
        /// What was found.
        found: String,
        /// What the model's shard has.
        expected: String,
    },
    /// A pack that was made from other files than the model's.
    #[error("{}: {what}: found {found}, expected {expected}; place it again from this model, or take it out of this folder", path.display())]
    OtherModel {
        /// The pack.
        path: PathBuf,
        /// The shard or expert.
        what: String,
        /// What the pack says.
        found: String,
        /// What the model has.
        expected: String,
    },
    /// Experts that no drive holds.
    #[error(
        "{count} of {all} experts have no home on any drive: {first}; name a further drive that holds them, or let the model's folder be read"
    )]
    NoHome {
        /// Experts without a home for all of their bytes.
        count: usize,
        /// Experts of the model.
        all: usize,
        /// The first of them.
        first: String,
    },
    /// A drive has too little space for its packs.
    #[error("{}: found {free} bytes free, expected at least {needed} for the packs of this plan; free some space or give this drive less", path.display())]
    NoSpace {
        /// A folder on the drive.
        path: PathBuf,
        /// Bytes that the packs need.
        needed: u64,
        /// Bytes free.
        free: u64,
    },
    /// No copy of some bytes agrees with their checksum.
    #[error(
        "expert {expert}: none of its {homes} homes gave the bytes that were placed ({damage}); fetch the shard again, or place the pack again"
    )]
    AllDamaged {
        /// The expert.
        expert: ExpertId,
        /// Homes that were tried.
        homes: usize,
        /// What was wrong at last.
        damage: String,
    },
}

impl PlacementError {
    pub(crate) fn io(path: &Path, action: &'static str, error: &std::io::Error) -> Self {
        Self::Io {
            path: path.to_path_buf(),
            action,
            reason: error.to_string(),
        }
    }
}
