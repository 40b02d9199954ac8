//! What can be wrong with a checkpoint, one line each: path, found, expected, next step.

use std::io;
use std::path::{Path, PathBuf};

/// A problem with a checkpoint or with writing one.
///
/// Every message is one line that names the file, what was found, what was expected and what to do next.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused an operation on a file or folder.
    #[error("{}: cannot {action}: {source}; check that the path exists and that you may use it", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What was tried, as a verb: `open`, `read`, `write` ...
        action: &'static str,
        /// The operating system's answer.
        source: io::Error,
    },

    /// A folder without `config.json` and without a shard.
    #[error("{}: found neither config.json nor a .safetensors file, expected a checkpoint folder as published; name the folder that holds them", path.display())]
    NotACheckpoint {
        /// The folder.
        path: PathBuf,
    },

    /// A JSON file that does not parse, or whose outline is not the published one.
    #[error("{}: found {found}, expected {expected}; download the file again", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The parser's message, or the value met.
        found: String,
        /// What should be there.
        expected: &'static str,
    },

    /// A field of `config.json` (or of a small file beside it) that is missing, contradictory or not supported.
    #[error("{}: {field}: found {found}, expected {expected}; use the config.json that belongs to a supported release", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// The field with its outer objects, such as `text_config.hidden_act`.
        field: String,
        /// The value met.
        found: String,
        /// The values that would do.
        expected: String,
    },

    /// A shard that the index (or the numbering of the shards) names is not in the folder.
    #[error("{}: found no such file, expected a shard that {named_by} names; download it", path.display())]
    MissingShard {
        /// Where the shard should be.
        path: PathBuf,
        /// What names it.
        named_by: &'static str,
    },

    /// A shard that ends before its own header does, or before the data that its header describes.
    #[error("{}: found {found} bytes, expected {expected}; the file is incomplete, resume or repeat its download", path.display())]
    ShortShard {
        /// The shard.
        path: PathBuf,
        /// Its length in bytes.
        found: u64,
        /// The length that its header implies (where even the header is cut, the end of the header), in bytes.
        expected: u64,
    },

    /// A shard with bytes after the data that its header describes.
    #[error("{}: found {found} bytes, expected {expected}; the file holds more than its header describes, download it again", path.display())]
    LongShard {
        /// The shard.
        path: PathBuf,
        /// Its length in bytes.
        found: u64,
        /// The length that its header implies, in bytes.
        expected: u64,
    },

    /// The first eight bytes of a shard give no believable header length.
    #[error("{}: found a header length of {found} bytes, expected at most {limit}; this is not a safetensors file, or a damaged one: download it again", path.display())]
    HeaderLength {
        /// The shard.
        path: PathBuf,
        /// The length that the file claims, in bytes.
        found: u64,
        /// The largest length accepted, in bytes.
        limit: u64,
    },

    /// The header of a shard is not the JSON that the format asks for.
    #[error("{}: found a header that does not parse ({detail}), expected JSON in the safetensors format; download the file again", path.display())]
    HeaderJson {
        /// The shard.
        path: PathBuf,
        /// The parser's message.
        detail: String,
    },

    /// An entry of a shard's header contradicts itself or the rest of the file.
    #[error("{}: {tensor}: found {found}, expected {expected}; download the file again", path.display())]
    HeaderEntry {
        /// The shard.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// What is wrong with it.
        fault: HeaderFault,
        /// What the entry says.
        found: String,
        /// What would be consistent.
        expected: String,
    },

    /// A tensor whose type is not the one that this architecture stores.
    #[error("{}: {tensor}: found dtype {found}, expected {expected}; use the files as published", path.display())]
    WrongDtype {
        /// The shard.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The type stored.
        found: crate::Dtype,
        /// The type that the architecture asks for.
        expected: crate::Dtype,
    },

    /// A tensor whose shape does not follow from `config.json`.
    #[error("{}: {tensor}: found shape {found}, expected {expected}; config.json and the shards are not of one release", path.display())]
    WrongShape {
        /// The shard.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The shape stored.
        found: String,
        /// The shape that follows from the configuration.
        expected: String,
    },

    /// A tensor that the architecture needs and no shard holds.
    #[error("{}: found no tensor {tensor}, expected it {place}; download that file again, or use the config.json of this release", path.display())]
    MissingTensor {
        /// The folder or shard.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Where it was looked for.
        place: &'static str,
    },

    /// A tensor that the architecture does not have (a bias, an extra layer): running without it would be wrong.
    #[error("{}: found tensor {tensor}, expected only tensors of Kimi K3; this release needs a program that knows the tensor", path.display())]
    UnexpectedTensor {
        /// The shard.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },

    /// A routed expert that is stored unpacked.
    #[error("{}: {tensor}: found a routed expert stored as plain weights, expected MXFP4 (weight_packed and weight_scale), the only expert format supported so far; use the MXFP4 release", path.display())]
    PlainExpert {
        /// The shard or the index.
        path: PathBuf,
        /// The first such tensor.
        tensor: String,
    },

    /// One tensor name in two shards.
    #[error("{}: found tensor {tensor} a second time, expected it only in {first}; remove the file that does not belong here", path.display())]
    TensorTwice {
        /// The later shard.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The file name of the earlier shard.
        first: String,
    },

    /// Index and header disagree about where a tensor is.
    #[error("{}: found tensor {tensor}, expected it in {expected} as the index says; download index and shard again", path.display())]
    WrongShard {
        /// The shard that holds it.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The shard that the index names, or `no shard`.
        expected: String,
    },

    /// The first of several problems.
    #[error("{first} (and {more} more: `anabranch inspect` lists them)")]
    Several {
        /// The first problem found.
        first: Box<Error>,
        /// How many others there are.
        more: u64,
    },

    /// A name that the checkpoint does not have.
    #[error("{}: found no tensor {name}, expected one of the trunk's {count} names; see the schema for them", path.display())]
    NoSuchTensor {
        /// The folder.
        path: PathBuf,
        /// The name asked for.
        name: String,
        /// How many names the trunk has.
        count: usize,
    },

    /// An expert that the model does not have.
    #[error("{}: found no expert {expert} in layer {layer}, expected layers {first_layer}..{layers} with experts 0..{experts}; ask for one of these", path.display())]
    NoSuchExpert {
        /// The folder.
        path: PathBuf,
        /// The layer asked for, from 0.
        layer: usize,
        /// The expert asked for, from 0.
        expert: usize,
        /// The first MoE layer.
        first_layer: usize,
        /// The number of layers.
        layers: usize,
        /// The number of experts in a MoE layer.
        experts: usize,
    },

    /// The folder to write a checkpoint to holds something already.
    #[error("{}: found {found} in the folder, expected an empty or new one; name another folder or empty this one", path.display())]
    TargetNotEmpty {
        /// The folder.
        path: PathBuf,
        /// The name of one thing in it.
        found: String,
    },

    /// The writing of a checkpoint was asked to stop.
    #[error("{}: found a request to stop, expected to go on writing; what was written is removed, run it again", path.display())]
    Stopped {
        /// The file being written.
        path: PathBuf,
    },

    /// The disk cannot hold the checkpoint to be written.
    #[error("{}: found {free} bytes free, expected {needed}; free some space or name a folder on another disk", path.display())]
    NoSpace {
        /// The folder or file being written.
        path: PathBuf,
        /// Bytes needed in all.
        needed: u64,
        /// Bytes free.
        free: u64,
    },
}

/// How an entry of a shard's header can be wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum HeaderFault {
    /// The dtype is not one of the format's.
    UnknownDtype,
    /// More dimensions than [`crate::MAX_RANK`].
    Rank,
    /// Shape times dtype is not the number of bytes between the offsets.
    ByteLength,
    /// The offsets run backwards or past 2^63.
    Offsets,
    /// The tensor begins before the one in front of it ends.
    Overlap,
    /// Bytes between two tensors belong to neither.
    Gap,
    /// The name occurs twice.
    Duplicate,
}

impl Error {
    /// Wraps an operating-system error.
    pub(crate) fn io(path: &Path, action: &'static str, source: io::Error) -> Error {
        Error::Io {
            path: path.to_owned(),
            action,
            source,
        }
    }
}
