//! What the publisher shipped: the files of a Kimi K3 checkpoint, read exactly as they are.

pub mod chat;
mod config;
mod error;
mod generation;
mod index;
mod open;
mod places;
mod safetensors;
mod scan;
mod schema;
mod survey;
mod synth;
#[cfg(any(test, feature = "testing"))]
pub mod tiny;
pub mod tokenizer;

pub use config::{K3Config, LinearAttnConfig, MXFP4_GROUP, SPECIAL_TOKENS};
pub use error::{Error, HeaderFault};
pub use generation::stop_ids;
pub use open::{Checkpoint, Shard};
pub use places::{ExpertPlace, Extent, PartPlace};
pub use safetensors::{Dtype, HeaderEntry, MAX_HEADER_BYTES, MAX_RANK, RawHeader, Shape};
pub use scan::{ShardReport, TensorInfo};
pub use schema::{Class, ExpertPart, Schema, Sizes, TEXT_PREFIX, TensorSpec, expert_tensor_name};
pub use survey::{Survey, survey};
pub use synth::{Progress, Summary, synthesize};
