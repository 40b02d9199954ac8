use crate::memory::human;
use std::path::PathBuf;

/// What stops the engine. Each message is one line with what was found, what was expected and the next step.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The checkpoint cannot be opened.
    #[error(transparent)]
    Checkpoint(#[from] checkpoint::Error),
    /// A read failed, or memory for reads cannot be had.
    #[error(transparent)]
    Drives(#[from] drives::Error),
    /// The drives do not hold the model's experts, or hold something else.
    #[error(transparent)]
    Placement(#[from] crate::PlacementError),
    /// A session file cannot be used.
    #[error(transparent)]
    Session(#[from] crate::SessionError),
    /// The converted trunk cannot be had.
    #[error(transparent)]
    Trunk(#[from] crate::TrunkError),
    /// The compute threads cannot be started.
    #[error(transparent)]
    Threads(#[from] kernels::ThreadsError),
    /// A tensor's bytes do not fit its shape, although the checkpoint was checked.
    #[error("internal disagreement: {0}; please report it")]
    Shape(#[from] kernels::ShapeError),
    /// The budget does not hold the least that the model needs.
    #[error(
        "memory budget of {budget} bytes ({}) is too small: this model needs at least {needed} bytes ({}: {table}); raise --memory to {needed}{hint}",
        human(*budget),
        human(*needed)
    )]
    Memory {
        /// Bytes given.
        budget: u64,
        /// Bytes that would do.
        needed: u64,
        /// Who needs how much.
        table: String,
        /// What else would help, with its separator; may be empty.
        hint: String,
    },
    /// An expert holds a scale byte that stands for no number.
    #[error(
        "{}: tensor {tensor}: scale byte 255 (not a number) at row {row}, block {block}, expected 0 to 254; the file is damaged, fetch it again",
        path.display()
    )]
    ScaleNan {
        /// The shard.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Row of the matrix.
        row: usize,
        /// Block of 32 columns.
        block: usize,
    },
    /// A token id that the vocabulary lacks.
    #[error("token id {found} is outside the vocabulary, expected 0 to {last}; check the ids")]
    TokenId {
        /// The id.
        found: u32,
        /// The largest id there is.
        last: u32,
    },
    /// There is nothing to continue.
    #[error("the prompt is empty: found 0 tokens, expected at least 1; give some text or ids")]
    EmptyPrompt,
    /// Nothing is to be made.
    #[error("found 0 new tokens, expected at least 1; ask for more")]
    NoTokens,
    /// The sequence does not fit the positions that memory was set aside for.
    #[error(
        "a sequence of {wanted} tokens does not fit the {positions} positions that memory was set aside for; raise --context, or ask for fewer tokens"
    )]
    Context {
        /// Tokens that the sequence would have.
        wanted: usize,
        /// Positions planned for.
        positions: usize,
    },
    /// The context asked for is longer than the model allows.
    #[error(
        "a context of {wanted} tokens is more than the {limit} that the model was made for (max_position_embeddings); ask for less"
    )]
    ContextLimit {
        /// Positions asked for.
        wanted: usize,
        /// The model's own limit.
        limit: usize,
    },
    /// A sequence whose last pass failed was used again.
    #[error(
        "a pass over this sequence failed midway, so its state is of no more use; start a new sequence from its tokens"
    )]
    Spoilt,
    /// A pass of more rows than planned.
    #[error("a pass of {found} rows, expected at most the {planned} that memory was set aside for; split it")]
    PassRows {
        /// Rows of the pass.
        found: usize,
        /// Rows planned for.
        planned: usize,
    },
    /// Logits of a row that the pass does not have.
    #[error("logits of row {found} of a pass of {rows} rows; ask for rows 0 to {}", rows.saturating_sub(1))]
    NoSuchRow {
        /// The row.
        found: usize,
        /// Rows of the pass.
        rows: usize,
    },
    /// A model that this program does not run, although its checkpoint is in order.
    #[error("{}: {what}: found {found}, expected {expected}; this model is not supported", path.display())]
    Unsupported {
        /// The configuration.
        path: PathBuf,
        /// The field or property.
        what: &'static str,
        /// Its value.
        found: usize,
        /// What would do.
        expected: String,
    },
    /// The model computed something that is not a number.
    #[error(
        "{}: the logits of row {row} hold NaN, expected numbers; the resident weights are damaged, fetch the shards again",
        path.display()
    )]
    NanLogits {
        /// The checkpoint's folder.
        path: PathBuf,
        /// Row of the pass.
        row: usize,
    },
    /// The caller asked to stop.
    #[error("cancelled")]
    Cancelled,
}
