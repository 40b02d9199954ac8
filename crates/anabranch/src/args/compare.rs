use std::path::PathBuf;

use super::notes::{COMPARE_NOTES, SIZE_NOTES};
use super::{ExpertsArgs, MachineArgs, TextsArgs};

/// Measure what settings that are not exact change: --trunk int8, --kv bf16, or both, against the published weights and f32 latents.
///
/// The same texts go through the model twice, token by token as they are. Without a text, a short one that comes with the program; with
/// neither --trunk nor --kv, --trunk int8.
#[derive(clap::Args)]
#[command(group = clap::ArgGroup::new("texts").args(["prompt", "ids_file", "questions"]))]
#[command(after_help = SIZE_NOTES, after_long_help = format!("{SIZE_NOTES}\n\n{COMPARE_NOTES}"))]
pub struct CompareArgs {
    /// Folder of the checkpoint, as published; without it a small demo model
    #[arg(long, value_name = "DIR")]
    pub model: Option<PathBuf>,

    #[command(flatten)]
    pub texts: TextsArgs,

    /// One JSON object instead of tables
    #[arg(long)]
    pub json: bool,

    /// Folder for the first side's logits until the second has its own, 655 KB a token for Kimi K3 [default: as --trunk-folder]
    #[arg(long, value_name = "DIR")]
    pub scratch: Option<PathBuf>,

    #[command(flatten)]
    pub experts: ExpertsArgs,

    #[command(flatten)]
    pub machine: MachineArgs,
}
