//! The run loop: budgets, passes, expert streaming, sampling.
//!
//! An [`Engine`] is one model on one machine. Opening it divides the memory it is given ([`MemoryPlan`]) among resident
//! weights, sequence state, the activations of a pass and slots for experts in flight, and loads what stays resident.
//! Only the pages of a sequence's latents are taken later, as it grows; the plan has counted them. A [`Sequence`] holds tokens
//! and the state after them; it can be branched, rolled back to a [`Snapshot`], saved ([`Engine::save`]) and restored from a
//! [`Session`] file. A [`PrefixStore`] keeps states of beginnings that may come again. [`Engine::pass`] runs rows of
//! any number of sequences through the model, with each needed expert read once; prompts, decoding and batches are all
//! passes. [`Engine::generate`] chooses tokens one after the other; a [`Batch`] does so for many requests that share their
//! passes. A [`Probe`] watches a pass: streams, routes, and guesses of the
//! next layer's routes.
//!
//! A [`Placement`] says which drives hold experts; [`place`] puts them there, by a [`PlacePlan`].
//!
//! ```no_run
//! use engine::{Cancel, Engine, Options, Request, Sampling};
//! use std::ops::ControlFlow;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let checkpoint = checkpoint::Checkpoint::open(std::path::Path::new("kimi-k3"))?;
//! let stop_ids = checkpoint.stop_ids().to_vec();
//! let mut engine = Engine::open(checkpoint, &Options::default(), &mut |_| ())?;
//! let request = Request { prompt: vec![1008, 10484, 318], max_tokens: 16, stop_ids, sampling: Sampling::default() };
//! let mut sequence = engine.new_sequence();
//! let made = engine.generate(&mut sequence, &request, &Cancel::default(), &mut |_| ControlFlow::Continue(()))?;
//! println!("{:?}, read {} bytes", made.ids, engine.stats().expert_bytes_read);
//! # Ok(())
//! # }
//! ```

mod batch;
mod engine;
mod error;
mod experts;
mod generate;
mod measure;
mod memory;
mod placement;
mod probe;
mod resident;
mod sample;
mod sequence;
mod session;
mod transcript;
mod trunk;

pub use batch::{Batch, Ended, Fairness, expected_experts};
pub use drives::Reader;
pub use engine::{Engine, Options, PassRows, Stats};
pub use error::Error;
pub use generate::{Cancel, Finish, Generated, Progress, PromptProgress, Request};
pub use kernels::{Isa, KvFormat, NUMERICS_VERSION, Routes};
pub use measure::{MEASURE_LEAST_BYTES, Measure};
pub use memory::{
    MAX_PASS_ROWS, MemoryPlan, RESERVE_BYTES, RESERVE_SHARE, Wishes, available_for_budget, default_budget, human,
    most_slot_bytes, peak_bytes, trunk_bytes,
};
pub use models::kimi_k3::{DEFAULT_MLA_EPS, state_bytes};
pub use placement::{
    ExpertSet, FolderReport, NamedDrive, Part, PlaceOptions, PlacePlan, PlaceProgress, PlaceReport, Placed, Placement,
    PlacementError, PlanLine, place,
};
pub use probe::{LayerProbe, Probe};
pub use sample::{Sampler, Sampling, greedy};
pub use sequence::{Sequence, Snapshot};
pub use session::{
    Identity, PREFIX_DAILY_BYTES, PREFIX_HELD_BYTES, PREFIX_INTERVAL_TOKENS, PrefixLimits, PrefixStats, PrefixStore,
    Session, SessionError,
};
pub use transcript::{Piece, Transcript};
pub use trunk::{LoadPhase, LoadProgress, NOT_WEIGHT_EXACT, TRUNK_SUFFIX, Trunk, TrunkError, TrunkFormat};
