//! Tokens one after the other.

use crate::engine::Engine;
use crate::error::Error;
use crate::sample::{Sampler, Sampling};
use crate::sequence::Sequence;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// A request to stop, shared with a signal handler or another thread.
#[derive(Clone, Debug, Default)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// Asks to stop. The engine does so before the next expert.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Takes the request back.
    pub fn reset(&self) {
        self.0.store(false, Ordering::Relaxed);
    }

    /// Whether somebody asked to stop.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        if self.is_cancelled() {
            Err(Error::Cancelled)
        } else {
            Ok(())
        }
    }
}

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// A stop token came, or the listener was satisfied.
    Stop,
    /// The number of tokens was reached.
    Length,
    /// Somebody asked to stop.
    Cancelled,
}

impl Finish {
    /// The name in results.
    pub fn name(self) -> &'static str {
        match self {
            Finish::Stop => "stop",
            Finish::Length => "length",
            Finish::Cancelled => "cancelled",
        }
    }
}

/// What to generate.
#[derive(Clone, Debug)]
pub struct Request {
    /// Ids to be fed before the first new token.
    pub prompt: Vec<u32>,
    /// Most new tokens.
    pub max_tokens: usize,
    /// Ids that end the generation; they are part of the result.
    pub stop_ids: Vec<u32>,
    /// How a token is chosen.
    pub sampling: Sampling,
}

/// What was generated.
#[derive(Clone, Debug, PartialEq)]
pub struct Generated {
    /// The new ids, a stop id included.
    pub ids: Vec<u32>,
    /// Why it ended.
    pub finish: Finish,
    /// Seconds until the first token was chosen.
    pub prefill_s: f64,
    /// Seconds from then on.
    pub decode_s: f64,
}

/// What happens while a request runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Progress {
    /// A layer has been run over tokens of the prompt.
    Prompt(PromptProgress),
    /// A new token.
    Token(u32),
}

/// How far a prompt has been taken.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PromptProgress {
    /// Tokens whose passes are done.
    pub done: usize,
    /// Tokens in all.
    pub of: usize,
    /// Share of the work that is done, from 0 to 1: layers of all passes, each pass weighted by the experts that it would read were routes
    /// uniform, see [`expected_experts`](crate::expected_experts).
    pub share: f64,
}

impl Engine {
    /// Continues `sequence` by the request's prompt and then by new tokens. The last new token is chosen but not fed: whoever
    /// goes on puts it in front of the next prompt. `listen` hears of progress and may end the
    /// generation; it then counts as stopped. When cancelled inside a pass the sequence is spoilt, see [`Sequence::is_spoilt`]
    /// and [`Sequence::decode_in_whole_passes`].
    pub fn generate(
        &mut self,
        sequence: &mut Sequence,
        request: &Request,
        cancel: &Cancel,
        listen: &mut dyn FnMut(Progress) -> ControlFlow<()>,
    ) -> Result<Generated, Error> {
        let start = Instant::now();
        let mut result = Generated {
            ids: vec![],
            finish: Finish::Length,
            prefill_s: 0.0,
            decode_s: 0.0,
        };
        let end = sequence.ids().len() + request.prompt.len() + request.max_tokens.saturating_sub(1);
        self.check_positions(end)?;
        let prompt = self.prefill(sequence, &request.prompt, cancel, &mut |progress| {
            let _ = listen(Progress::Prompt(progress));
        });
        result.prefill_s = start.elapsed().as_secs_f64();
        let mut logits = match prompt {
            Ok(logits) => logits,
            Err(Error::Cancelled) => {
                result.finish = Finish::Cancelled;
                return Ok(result);
            }
            Err(e) => return Err(e),
        };
        let start = Instant::now();
        let mut sampler = Sampler::new(request.sampling);
        while result.ids.len() < request.max_tokens {
            let id = sampler.choose(&logits);
            result.ids.push(id);
            if listen(Progress::Token(id)).is_break() || request.stop_ids.contains(&id) {
                result.finish = Finish::Stop;
                break;
            }
            if result.ids.len() == request.max_tokens {
                break;
            }
            let never = Cancel::default();
            let in_pass = match sequence.whole_passes {
                true => &never,
                false => cancel,
            };
            let next = cancel
                .check()
                .and_then(|()| self.prefill(sequence, &[id], in_pass, &mut |_| ()));
            match next {
                Ok(next) => logits = next,
                Err(Error::Cancelled) => {
                    result.finish = Finish::Cancelled;
                    break;
                }
                Err(e) => return Err(e),
            }
        }
        result.decode_s = start.elapsed().as_secs_f64();
        Ok(result)
    }
}
