//! What the publisher shipped: a Kimi K3 checkpoint, read exactly as it lies in its folder.
//!
//! A checkpoint is `config.json`, an index, and shards in the safetensors format: for K3 130 MB of names and
//! numbers, and 1.56 TB of tensors. This crate reads the first and never the second: it knows where every byte is and
//! what it means, and leaves reading it to others.
//!
//! - [`K3Config`] is the configuration, checked: whatever is missing, contradicts itself or is not supported is
//!   refused by name.
//! - [`Schema`] is the table of tensors that follows from it: names, types, shapes. It is the only place that knows
//!   shapes.
//! - [`Checkpoint`] is a folder that holds all of them. The *trunk*, which every token uses, is found by name
//!   ([`Checkpoint::tensor`]); a *routed expert*, of which there are 82,432, by layer and number
//!   ([`Checkpoint::expert`]), as an [`ExpertPlace`] of one extent where its six tensors lie side by side.
//! - [`survey()`] is the same pass over a folder that may be wrong: it goes on after a problem and says all that is
//!   missing.
//! - [`synthesize`] writes a random checkpoint in the published layout, of any size, also as headers over holes.
//! - [`tokenizer::Tokenizer`] turns text into ids and ids into whole characters; [`chat`] renders conversations and reads
//!   answers, so that text from a user can never become a control token.
//!
//! Errors ([`Error`]) are one line: path, found, expected, next step.
//!
//! Opening a folder without an index takes every `.safetensors` file in it for a shard. Vision tensors are skipped, and
//! shards of vision tensors alone may be absent. Only MXFP4 experts are supported; they are known by their
//! `weight_packed` tensors, whatever the configuration says. Scale bytes are data and are not looked at here.
//!
//! ```
//! use checkpoint::{Checkpoint, ExpertPart, synthesize};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = tempfile::tempdir()?;
//! # let folder = folder.path();
//! let config = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/testdata/k3-tiny-config.json"));
//! synthesize(config, 1, folder, false, &mut |_| ())?;
//!
//! let checkpoint = Checkpoint::open(folder)?;
//! let embedding = checkpoint.tensor("model.embed_tokens.weight")?;
//! assert_eq!(embedding.shape.dims(), [512, 128]);
//!
//! let place = checkpoint.expert(1, 5)?;
//! let [extent] = place.extents() else { panic!("six tensors side by side") };
//! let shard = &checkpoint.shards()[extent.shard];
//! println!("read {} bytes at {} of {}", extent.len, extent.offset, shard.path.display());
//! println!("the down projection starts {} bytes in", place.part(ExpertPart::W2Packed).offset);
//! # Ok(())
//! # }
//! ```

pub mod chat;
mod config;
mod error;
mod generation;
mod index;
mod open;
mod page_cache;
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
pub use synth::{Progress, SYNTH_VERSION, Summary, synthesize};
