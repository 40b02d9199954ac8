//! What a run did, in numbers: reads what the engine publishes, and nothing below the command line needs it.
//!
//! A [`RoutingTally`] is a probe. Given to the passes of [`engine::Engine::pass`], it counts for each layer which experts
//! the tokens were routed to, how many of a token's experts the token before had used, and how many the engine could have
//! guessed from the layer before: what a cache, a hot set and look-ahead reads can hope for. The counts are a
//! [`LayerRouting`] a layer, made of [`Ratio`]s and reads by expert; [`top_share`] is the share of the most read.
//!
//! [`Ngram`] replays a text as if drafts had been made from its own repetitions, and counts what would have been accepted.
//!
//! A [`LogitsTally`] and two [`RouteLog`]s say how far two models, or one with two settings, are apart on the same text.
//!
//! A [`ReadRecord`] is a read of a drive as a line of a file; [`write_chrome_trace`] makes of them what trace viewers show.
//!
//! Everything here counts; nothing estimates, and the same run gives the same counts on every machine.
//!
//! ```
//! use engine::Routes;
//! use instruments::{Ngram, RoutingTally, top_share};
//!
//! // Two tokens of a layer of four experts, two for each token, and what was guessed for them.
//! let routes = Routes { top_k: 2, experts: vec![0, 1, 0, 3], weights: vec![0.5; 4] };
//! let guess = Routes { top_k: 2, experts: vec![0, 1, 0, 2], weights: vec![0.5; 4] };
//! let mut tally = RoutingTally::new(4, &[2]);
//! tally.add(1, &routes, &[guess]);
//! let layer = &tally.layers()[0];
//! assert_eq!(layer.repeat.value(), Some(0.5));
//! assert_eq!(layer.recall[0].value(), Some(0.75));
//! assert_eq!(top_share(&layer.reads, 0.25), Some(0.5));
//!
//! let counts = Ngram { matched: 1, longest: 4 }.replay(&[7, 8, 9, 7, 8, 9, 7], 1);
//! assert_eq!((counts.drafted, counts.accepted), (2, 2));
//! ```

mod compare;
mod ngram;
mod reads;
mod routing;

pub use compare::{LayerAgreement, LogitsTally, RouteLog};
pub use ngram::{DraftCounts, Ngram};
pub use reads::{ReadRecord, RecordClass, write_chrome_trace};
pub use routing::{LayerRouting, Ratio, RoutingTally, top_share};
