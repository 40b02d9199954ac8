//! The command line as the user writes it.

use std::ffi::OsString;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::LazyLock;

use clap::{Parser, Subcommand, ValueEnum};
use engine::{Isa, KvFormat, Reader, TrunkFormat};

use crate::ids::{self, Ids};
use crate::sizes;

mod compare;
mod notes;
mod values;

pub use compare::CompareArgs;
use notes::{JOBS_NOTES, ROUTING_NOTES, RUN_NOTES, SIZE_NOTES};
use values::{epsilon, isa, kv, min_p, positive, reader, stop_text, temperature, top_p, trunk};

/// New tokens when `--max-tokens` does not say.
pub const DEFAULT_MAX_TOKENS: usize = 512;
/// Positions of a chat when `--context` does not say.
pub const DEFAULT_CHAT_CONTEXT: usize = 8192;
/// Compute threads that may be asked for.
const THREADS: RangeInclusive<u64> = 1..=1024;

static VERSION: LazyLock<String> =
    LazyLock::new(|| format!("{} (numerics {})", env!("CARGO_PKG_VERSION"), engine::NUMERICS_VERSION));

/// Runs mixture-of-experts models that are many times larger than memory, on one machine, by streaming the experts of
/// each layer from disk.
#[derive(Parser)]
#[command(name = "anabranch", version = VERSION.as_str(), arg_required_else_help = true)]
pub struct Args {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Subcommand)]
pub enum Command {
    Run(Box<RunArgs>),
    Jobs(Box<JobsArgs>),
    Inspect(InspectArgs),
    Logits(LogitsArgs),
    Compare(Box<CompareArgs>),
    Drives(DrivesArgs),
    Place(PlaceArgs),
    Verify(VerifyArgs),
    Synth(SynthArgs),
    Trace(TraceArgs),
}

/// Answer a prompt, or chat.
///
/// The text goes to standard output, everything else to standard error. Without a prompt, and with a terminal as
/// standard input, a chat begins.
#[derive(clap::Args)]
#[command(after_help = SIZE_NOTES, after_long_help = format!("{SIZE_NOTES}\n\n{RUN_NOTES}"))]
pub struct RunArgs {
    /// Folder of the checkpoint, as published; without it a small demo model
    #[arg(long, value_name = "DIR")]
    pub model: Option<PathBuf>,

    /// The prompt; `-` reads all of standard input, as it is
    ///
    /// Text that spells a control token is ordinary text.
    #[arg(long, value_name = "TEXT")]
    pub prompt: Option<OsString>,

    /// The prompt as token ids with commas between, fed as they are
    #[arg(long, value_name = "IDS", value_parser = ids::parse, conflicts_with = "prompt")]
    pub ids: Option<Ids>,

    /// Continue the prompt's text instead of answering it: no chat format around it
    #[arg(long, conflicts_with = "ids")]
    pub raw: bool,

    /// Instructions in front of the conversation
    #[arg(long, value_name = "TEXT", conflicts_with_all = ["raw", "ids"])]
    pub system: Option<OsString>,

    /// How much the model thinks before it answers
    ///
    /// The publisher's default is max; here it is off, since thoughts are thousands of tokens, which take hours when
    /// experts are streamed from disk. Thoughts go to standard error.
    #[arg(long, value_name = "EFFORT", default_value = "off", conflicts_with_all = ["raw", "ids"])]
    pub thinking_effort: EffortName,

    /// Most new tokens [default: 512, or as many as fit]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub max_tokens: Option<usize>,

    /// End the answer before this text; may be repeated
    #[arg(long, value_name = "TEXT", value_parser = stop_text)]
    pub stop: Vec<String>,

    /// Go on where this file ends, and save there after each answer; a new file begins a new session
    ///
    /// It holds the tokens and the state after them, so that nothing is computed twice. With --raw or --ids the new prompt follows the
    /// stored text; --raw without a prompt continues it.
    #[arg(long, value_name = "FILE")]
    pub session: Option<PathBuf>,

    /// One JSON object on standard output, at the end, instead of text
    ///
    /// Its fields are prompt_ids, ids, text, reasoning, finish_reason (stop, length, cancelled), trunk and stats.
    #[arg(long)]
    pub json: bool,

    /// A table of times and bytes on standard error, at the end
    #[arg(long)]
    pub stats: bool,

    /// Write each read of an expert to this file, one JSON object a line
    #[arg(long, value_name = "F.jsonl")]
    pub events: Option<PathBuf>,

    /// How the memory is divided, which kernels run, what the drives hold
    #[arg(long, short)]
    pub verbose: bool,

    #[command(flatten)]
    pub prefix: PrefixArgs,

    #[command(flatten)]
    pub sampling: SamplingArgs,

    #[command(flatten)]
    pub experts: ExpertsArgs,

    #[command(flatten)]
    pub machine: MachineArgs,

    /// Tokens that the sequence may reach [default: what prompt and answer need; 8192 in a chat]
    #[arg(long, value_name = "N", value_parser = positive, help_heading = "Machine")]
    pub context: Option<usize>,
}

/// Answer a file of questions, many at a time.
///
/// IN has a request a line, in OpenAI's batch format; each gets one line in OUT, as soon as it is done. A run that was stopped,
/// killed even, goes on when the same command is given again: what OUT has is not done twice, and is the same as without the
/// stop.
#[derive(clap::Args)]
#[command(after_help = SIZE_NOTES, after_long_help = format!("{SIZE_NOTES}\n\n{JOBS_NOTES}"))]
pub struct JobsArgs {
    /// The questions: a JSON object a line, with custom_id, method, url and body
    #[arg(value_name = "IN.jsonl")]
    pub input: PathBuf,

    /// The results; what an earlier run left there is kept
    #[arg(value_name = "OUT.jsonl")]
    pub output: PathBuf,

    /// Folder of the checkpoint, as published; without it a small demo model
    #[arg(long, value_name = "DIR")]
    pub model: Option<PathBuf>,

    /// How much the model thinks where a line has no reasoning_effort
    #[arg(long, value_name = "EFFORT", default_value = "off")]
    pub thinking_effort: EffortName,

    /// Most new tokens where a line does not say [default: 512]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub max_tokens: Option<usize>,

    /// Most requests that run at one time [default: as many as fit the memory, up to 1024]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub batch: Option<usize>,

    /// Most tokens of a request, prompt and answer; longer ones get an error [default: the model's own limit]
    ///
    /// Every request that runs gets memory for as many tokens as the longest line needs.
    #[arg(long, value_name = "N", value_parser = positive)]
    pub context: Option<usize>,

    /// The summary as one JSON object on standard output, at the end
    #[arg(long)]
    pub json: bool,

    /// A table of times and bytes on standard error, at the end
    #[arg(long)]
    pub stats: bool,

    /// How the memory is divided, and a line of progress every 30 seconds
    #[arg(long, short)]
    pub verbose: bool,

    #[command(flatten)]
    pub experts: ExpertsArgs,

    #[command(flatten)]
    pub machine: MachineArgs,
}

#[derive(clap::Args)]
#[command(next_help_heading = "Drives")]
pub struct ExpertsArgs {
    /// A folder with shards or packs of the model, to read experts from as well; may be repeated
    ///
    /// The model's own folder is read too. Folders on one device are one drive.
    #[arg(long = "drive", value_name = "PATH")]
    pub drives: Vec<PathBuf>,

    /// A file that lists such folders; docs/layout.md describes it
    #[arg(long, value_name = "FILE", conflicts_with = "drives")]
    pub layout: Option<PathBuf>,
}

#[derive(clap::Args)]
#[command(next_help_heading = "Prefix store")]
pub struct PrefixArgs {
    /// Keep states of prompts and answers in this folder, and begin with the longest that fits; off: do not
    ///
    /// Without a folder: the user's folder for cached files. Each state of Kimi K3 takes 465 MB and 55 KB a token.
    #[arg(long, value_name = "DIR|off", num_args = 0..=1, default_value = "off", default_missing_value = "",
          hide_default_value = true)]
    pub prefix_store: OsString,

    /// Most bytes that the store holds [default: 16GiB]
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse, requires = "prefix_store", hide_short_help = true)]
    pub prefix_held: Option<u64>,

    /// Most bytes that are written to the store in a day [default: 64GiB]
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse, requires = "prefix_store", hide_short_help = true)]
    pub prefix_daily: Option<u64>,
}

#[derive(clap::Args)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingArgs {
    /// Divides the logits; 0 always takes the most likely token [default: 0]
    #[arg(long, value_name = "F", value_parser = temperature, allow_negative_numbers = true)]
    pub temperature: Option<f32>,

    /// Draw from the N most likely tokens; 0: from all
    #[arg(long, value_name = "N", requires = "temperature", allow_negative_numbers = true)]
    pub top_k: Option<usize>,

    /// Draw from the most likely tokens whose probabilities reach this sum
    #[arg(long, value_name = "F", requires = "temperature", value_parser = top_p, allow_negative_numbers = true)]
    pub top_p: Option<f32>,

    /// Draw from tokens at least this likely relative to the most likely one
    #[arg(long, value_name = "F", requires = "temperature", value_parser = min_p, allow_negative_numbers = true)]
    pub min_p: Option<f32>,

    /// Chooses the random numbers; the same seed gives the same text
    #[arg(long, value_name = "N", requires = "temperature", allow_negative_numbers = true)]
    pub seed: Option<u64>,
}

#[derive(clap::Args)]
#[command(next_help_heading = "Machine")]
pub struct MachineArgs {
    /// Memory to use [default: what is available, less the larger of 2 GiB and 10 %]
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse)]
    pub memory: Option<u64>,

    /// Most memory in which experts stay after their use, 0 for none [default: what is left of --memory]
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse)]
    pub cache: Option<u64>,

    /// Compute threads [default: one for each processor]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(THREADS))]
    pub threads: Option<u64>,

    /// Kernels: plain, avx2 or avx512; all give the same bits [default: the fastest that runs here]
    #[arg(long, value_name = "NAME", value_parser = isa, hide_short_help = true)]
    pub isa: Option<Isa>,

    /// How drives are read: best (io_uring where the system has it) or threads
    #[arg(long, value_name = "HOW", default_value_t = Reader::Best, value_parser = reader, hide_short_help = true)]
    pub reader: Reader,

    /// How the context's latents are kept: bf16 takes half the memory of f32 and gives other bits
    #[arg(long, value_name = "FORMAT", default_value_t = KvFormat::F32, value_parser = kv)]
    pub kv: KvFormat,

    /// The resident matrices: bf16 as published, or int8, half the memory, converted once and not weight-exact [default: bf16]
    ///
    /// int8 keeps a file of half the trunk's bytes (56.5 GB for Kimi K3). docs/trunk.md says what is converted; `anabranch compare`
    /// measures what that changes.
    #[arg(long, value_name = "FORMAT", value_parser = trunk)]
    pub trunk: Option<TrunkFormat>,

    /// Folder in which converted trunks are kept [default: in the user's folder for cached files]
    #[arg(long, value_name = "DIR")]
    pub trunk_folder: Option<PathBuf>,

    /// Epsilon of the two norms inside MLA, which the release leaves to the code
    #[arg(long, value_name = "F", default_value_t = engine::DEFAULT_MLA_EPS, value_parser = epsilon,
          allow_negative_numbers = true, hide_short_help = true)]
    pub mla_eps: f32,
}

/// Say what a checkpoint's folder holds, what is missing, and what memory it needs.
///
/// Only the small files and the shards' headers are read. The exit status is 1 when something is missing or wrong.
#[derive(clap::Args)]
#[command(after_help = SIZE_NOTES)]
pub struct InspectArgs {
    /// Folder of the checkpoint; without it the demo model
    pub dir: Option<PathBuf>,

    /// One JSON object instead of tables
    #[arg(long)]
    pub json: bool,

    /// Divide this memory [default: what is available, less the larger of 2 GiB and 10 %]
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse)]
    pub memory: Option<u64>,

    /// Count the context's latents in this format: f32 or bf16
    #[arg(long, value_name = "FORMAT", default_value_t = KvFormat::F32, value_parser = kv)]
    pub kv: KvFormat,

    /// Count the resident matrices in this format: bf16 or int8
    #[arg(long, value_name = "FORMAT", default_value_t = TrunkFormat::Bf16, value_parser = trunk)]
    pub trunk: TrunkFormat,
}

/// Write the logits after a prompt to a .npy file.
///
/// They are f32 of shape (vocabulary), or with --all (tokens, vocabulary).
#[derive(clap::Args)]
#[command(after_help = SIZE_NOTES)]
pub struct LogitsArgs {
    /// Folder of the checkpoint, as published; without it a small demo model
    #[arg(long, value_name = "DIR")]
    pub model: Option<PathBuf>,

    /// The prompt as token ids with commas between
    #[arg(long, value_name = "IDS", value_parser = ids::parse)]
    pub ids: Ids,

    /// The logits after every token, not only after the last
    #[arg(long)]
    pub all: bool,

    /// The file to write; it appears when it is complete
    #[arg(long, value_name = "F.npy")]
    pub out: PathBuf,

    #[command(flatten)]
    pub experts: ExpertsArgs,

    #[command(flatten)]
    pub machine: MachineArgs,
}

/// Say what drives folders are on and how fast they are.
///
/// Each drive is read for a moment, alone and together with the others, from the largest files that its folders hold; nothing
/// is written. Folders on one device are one drive.
#[derive(clap::Args)]
pub struct DrivesArgs {
    /// Folders; without any, the one this is called in
    #[arg(value_name = "PATH")]
    pub paths: Vec<PathBuf>,

    /// One JSON array instead of a table
    #[arg(long)]
    pub json: bool,
}

/// Write packs: chosen ranges of a model's experts, for other drives.
///
/// The plan says which drive gets what; docs/layout.md describes it. Each pack is read back and compared before it gets its name.
/// Packs that are there already are kept, so a run that was stopped can be repeated.
#[derive(clap::Args)]
pub struct PlaceArgs {
    /// Folder of the checkpoint, as published
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,

    /// JSON lines, such as {"drive": "/mnt/b/kimi-k3", "layer": 1, "experts": "0-99"}
    #[arg(long, value_name = "FILE")]
    pub plan: PathBuf,

    /// Refuse a plan after which packs alone would not hold every expert
    #[arg(long)]
    pub only_packs: bool,
}

/// Read packs whole and compare them with their checksums.
///
/// The exit status is 1 when a pack is damaged.
#[derive(clap::Args)]
pub struct VerifyArgs {
    /// Packs, or folders whose packs are read
    #[arg(value_name = "PACK", required = true)]
    pub packs: Vec<PathBuf>,
}

/// Write a random checkpoint in the published layout.
///
/// It has the files, names, shapes and types of a release with this configuration; the weights are random, so the text
/// means nothing.
#[derive(clap::Args)]
pub struct SynthArgs {
    /// The config.json that says how large everything is
    #[arg(long, value_name = "C.json")]
    pub config: PathBuf,

    /// Chooses the weights
    #[arg(long, value_name = "S")]
    pub seed: u64,

    /// A new or empty folder
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,

    /// True headers over holes: a model of any size, to open and plan with
    #[arg(long)]
    pub sparse: bool,
}

/// Look into what a model does.
#[derive(clap::Args)]
pub struct TraceArgs {
    #[command(subcommand)]
    pub command: TraceCommand,
}

#[derive(Subcommand)]
pub enum TraceCommand {
    Routing(RoutingArgs),
    Export(ExportArgs),
}

/// Count how a model routes: skew, repetition, look-ahead; and what drafts from repetition would gain.
///
/// The tables are Markdown. A read is one token's need of one expert. Every table ends with what even, independent routes
/// would give.
#[derive(clap::Args)]
#[command(after_help = SIZE_NOTES, after_long_help = format!("{SIZE_NOTES}\n\n{ROUTING_NOTES}"))]
#[command(group = clap::ArgGroup::new("texts").required(true).args(["prompt", "ids_file", "questions"]))]
pub struct RoutingArgs {
    /// Folder of the checkpoint, as published; without it a small demo model
    #[arg(long, value_name = "DIR")]
    pub model: Option<PathBuf>,

    #[command(flatten)]
    pub texts: TextsArgs,

    /// Most tokens that the model adds to each text, always the most likely; they are counted too
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub max_tokens: usize,

    /// One JSON object instead of tables
    #[arg(long)]
    pub json: bool,

    #[command(flatten)]
    pub machine: MachineArgs,
}

#[derive(clap::Args)]
pub struct TextsArgs {
    /// A question, put as `run` puts it; `-` reads all of standard input
    #[arg(long, value_name = "TEXT")]
    pub prompt: Option<OsString>,

    /// The prompt is plain text: no chat format around it
    #[arg(long, requires = "prompt", conflicts_with_all = ["ids_file", "questions"])]
    pub raw: bool,

    /// Texts as token ids: a JSON object whose `ids` is a list of ids, or a list of such lists
    #[arg(long, value_name = "F.json")]
    pub ids_file: Option<PathBuf>,

    /// Questions: on each line a JSON object with `messages` (each `role` and `content`) and perhaps `effort`
    ///
    /// Roles are system, user and assistant; efforts are off (the default), low, high and max. Other fields are ignored.
    #[arg(long, value_name = "F.jsonl")]
    pub questions: Option<PathBuf>,
}

/// Turn the events of `run --events` into a trace for Perfetto (https://ui.perfetto.dev).
///
/// It has a track of barriers and one for each drive, with a span for each read.
#[derive(clap::Args)]
#[allow(rustdoc::bare_urls)] // shown on a terminal
pub struct ExportArgs {
    /// What `run --events` wrote
    #[arg(value_name = "F.jsonl")]
    pub events: PathBuf,

    /// The file to write [default: beside the events, ending in .trace.json]
    #[arg(long, value_name = "F.json")]
    pub out: Option<PathBuf>,
}

#[derive(Clone, Copy, ValueEnum)]
pub enum EffortName {
    Off,
    Low,
    High,
    Max,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Args::command().debug_assert();
    }
}
