//! Model architectures, each readable as a paper, in terms of the `kernels` vocabulary.
//!
//! [`kimi_k3::KimiK3`] is loaded from a [`TensorSource`] (resident tensors by name) and run by
//! [`KimiK3::forward`](kimi_k3::KimiK3::forward): one pass over rows of any number of sequences, each with its explicit
//! [`State`](kimi_k3::State). Routed experts are never resident: the pass takes an [`ExpertStream`], says which experts a
//! layer needs, and runs each as it lands. This crate knows no file and no drive.
//!
//! What a pass and a sequence cost in memory follows from the configuration alone:
//!
//! ```no_run
//! use models::kimi_k3::{Workspace, state_bytes};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let config = checkpoint::K3Config::read(std::path::Path::new("kimi-k3/config.json"))?;
//! println!("{} bytes a sequence of 4,096 tokens", state_bytes(&config, 4096, kernels::KvFormat::F32));
//! println!("{} bytes for passes of 64 rows", Workspace::bytes(&config, 64));
//! # Ok(())
//! # }
//! ```

pub mod kimi_k3;
mod source;

pub use source::{EXPERTS_TOGETHER, ExpertStream, RunExperts, Tensor, TensorSource};
