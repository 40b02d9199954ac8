//! What ends a command early.

use std::io;
use std::path::{Path, PathBuf};

/// An error, or another reason to end before the end. Each message is one line.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Engine(#[from] engine::Error),
    #[error(transparent)]
    Placement(#[from] engine::PlacementError),
    #[error(transparent)]
    Drives(#[from] drives::Error),
    #[error(transparent)]
    Pack(#[from] drives::PackError),
    #[error(transparent)]
    Checkpoint(#[from] checkpoint::Error),
    #[error(transparent)]
    Tokenizer(#[from] checkpoint::tokenizer::TokenizerError),
    /// The command line asks for something that cannot be.
    #[error("{0}")]
    Usage(String),
    #[error(
        "{place}: found byte 0x{byte:02x} at offset {offset}, expected UTF-8 text; convert it first (iconv -t UTF-8), or give ids with --ids"
    )]
    NotUtf8 {
        place: &'static str,
        byte: u8,
        offset: usize,
    },
    #[error("the prompt is empty: found 0 bytes with --raw, expected at least 1; give some text, or leave out --raw")]
    EmptyRaw,
    /// A file of texts is not what it should be.
    #[error("{}{}: {found}, expected {expected}; correct the file", path.display(), line.map(|n| format!(": line {n}")).unwrap_or_default())]
    Form {
        path: PathBuf,
        line: Option<usize>,
        found: String,
        expected: &'static str,
    },
    /// A session file holds something else than is to be continued.
    #[error("{}: found {found}, expected {expected}; name another file with --session", path.display())]
    SessionNote {
        path: PathBuf,
        found: String,
        expected: &'static str,
    },
    /// Prompt and answer do not fit.
    #[error(
        "a prompt of {prompt} tokens and --max-tokens {max_tokens} make {}, expected at most {limit} ({limited_by}); {next}",
        prompt.saturating_add(*max_tokens)
    )]
    TooLong {
        prompt: usize,
        max_tokens: usize,
        limit: usize,
        limited_by: &'static str,
        next: &'static str,
    },
    #[error("{}: cannot {action}: {source}; {}", path.display(), advice(action))]
    File {
        path: PathBuf,
        action: &'static str,
        source: io::Error,
    },
    #[error(
        "found no folder for cached files (neither XDG_CACHE_HOME nor HOME is set), expected one for the demo model; set HOME, or name a model with --model"
    )]
    NoCache,
    #[error("{}: found {free} bytes free, expected {wanted}; free some space, or name a folder on another drive with --scratch", path.display())]
    NoScratch { path: PathBuf, free: u64, wanted: String },
    #[error("standard output: cannot write: {0}; check where the output goes")]
    Output(io::Error),
    #[error("standard input: cannot read: {0}; check where the input comes from")]
    Input(io::Error),
    #[error("cannot listen for Ctrl-C: {0}; report it")]
    Signals(#[from] ctrlc::Error),
    #[error("{}: found {problems} problems, expected a complete checkpoint; {next}", path.display())]
    Incomplete { path: PathBuf, problems: u64, next: String },
    #[error(
        "found {damaged} of {of} packs damaged, expected none; delete them and place them again, runs read other copies meanwhile"
    )]
    DamagedPacks { damaged: usize, of: usize },
    #[error("{}: found {found}, expected a file; name a file", path.display())]
    NotAFile { path: PathBuf, found: &'static str },
    #[error("{}: found the input itself, expected another file for the results; name one", path.display())]
    SameFile { path: PathBuf },
    #[error("{}: found another process that uses this session, expected none; wait for it, or name another file", path.display())]
    SessionInUse { path: PathBuf },
    #[error("{}: cannot read the events: {source}; give a file that run --events wrote", path.display())]
    EventsFile { path: PathBuf, source: io::Error },
    #[error("{}: found no pack, expected files in .pack; name a drive's folder or a pack", path.display())]
    NoPack { path: PathBuf },
    #[error(
        "{}: found another process that writes these results, expected none; wait for it, or name another file",
        path.display()
    )]
    ResultsInUse { path: PathBuf },
    #[error(
        "{}: found {others} results of other lines, another model or other settings, expected only results of {}; name another file, or repeat the first command",
        path.display(),
        input.display()
    )]
    OtherResults { path: PathBuf, input: PathBuf, others: u64 },
    /// All lines are done, but not all are answered.
    #[error(
        "{}: found errors for {errors} of {of} lines, expected none; each says what is wrong with its line",
        path.display()
    )]
    LineErrors { path: PathBuf, errors: u64, of: u64 },
    /// Somebody pressed Ctrl-C, and what there is has been shown.
    #[error("interrupted")]
    Interrupted,
}

/// What to look at when a file could not be used.
fn advice(action: &str) -> &'static str {
    match action {
        "read" | "open" | "list" => "check the path, and that you may read it",
        _ => "check that the folder exists, has room, and that you may write to it",
    }
}

impl Error {
    pub fn file(path: &Path, action: &'static str, source: io::Error) -> Self {
        Error::File {
            path: path.to_owned(),
            action,
            source,
        }
    }

    /// Whether it is Ctrl-C, wherever it was noticed.
    pub fn is_interrupt(&self) -> bool {
        matches!(
            self,
            Error::Interrupted
                | Error::Engine(engine::Error::Cancelled)
                | Error::Checkpoint(checkpoint::Error::Stopped { .. })
                | Error::Pack(drives::PackError::Stopped { .. })
                | Error::Placement(engine::PlacementError::Pack(drives::PackError::Stopped { .. }))
        )
    }
}
