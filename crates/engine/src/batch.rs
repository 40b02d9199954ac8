//! Sequences that advance together, join between two passes and leave when they are done.

use crate::engine::{Engine, PassRows};
use crate::error::Error;
use crate::generate::{Cancel, Finish, Generated, Request};
use crate::probe::Probe;
use crate::sample::Sampler;
use crate::sequence::Sequence;
use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::time::Instant;

mod fairness;

use fairness::Wants;
pub use fairness::{Fairness, expected_experts};

/// Requests that share their passes, so that an expert is read once for all rows that need it.
///
/// Memory is admitted up front: at most as many sequences run as the engine's [`MemoryPlan`](crate::MemoryPlan) has state for, each
/// up to the planned positions; further requests wait. Every sequence gives the tokens that it would give alone. `T` is what
/// the caller wants to be reminded of.
pub struct Batch<T> {
    fairness: Fairness,
    /// Most sequences at one time.
    limit: usize,
    pass_rows: usize,
    waiting: VecDeque<(Request, T)>,
    /// In order of arrival.
    running: Vec<Member<T>>,
}

struct Member<T> {
    tag: T,
    request: Request,
    sequence: Sequence,
    sampler: Sampler,
    joined: Instant,
    /// When the first token was chosen.
    began: Option<Instant>,
    ids: Vec<u32>,
}

/// A request that has left the batch.
pub struct Ended<T> {
    /// What it was joined with.
    pub tag: T,
    /// What was generated.
    pub generated: Generated,
    /// Its state, in which the last new token has not been fed. It counts as memory until it is dropped.
    pub sequence: Sequence,
}

impl<T> Batch<T> {
    /// An empty batch for the engine whose passes it will take.
    pub fn new(engine: &Engine, fairness: Fairness) -> Self {
        let plan = engine.plan();
        Self {
            fairness,
            // A pass has a row for each of them.
            limit: plan.sequences.min(plan.pass_rows),
            pass_rows: plan.pass_rows,
            waiting: VecDeque::new(),
            running: vec![],
        }
    }

    /// Takes a request, which runs from the next pass for which there is room.
    ///
    /// # Errors
    ///
    /// What can never run is refused at once: an empty prompt, no token to be made, a token outside the vocabulary, or more positions than
    /// memory was set aside for.
    pub fn join(&mut self, engine: &Engine, request: Request, tag: T) -> Result<(), Error> {
        engine.check_request(&request)?;
        self.waiting.push_back((request, tag));
        Ok(())
    }

    /// Whether a request that joins now would run in the next pass.
    pub fn has_room(&self) -> bool {
        self.running.len() + self.waiting.len() < self.limit
    }

    /// Most sequences that run at one time.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Sequences that run.
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// Tokens that the running sequences have generated.
    pub fn generated(&self) -> usize {
        self.running.iter().map(|member| member.ids.len()).sum()
    }

    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// One pass. `listen` hears each new token and may end its sequence, which then counts as stopped. Returns the sequences that are done.
    ///
    /// # Errors
    ///
    /// Those of [`Engine::pass`], after which the sequences of the pass are of no more use: drop the batch.
    pub fn step(
        &mut self,
        engine: &mut Engine,
        cancel: &Cancel,
        probe: Option<&mut dyn Probe>,
        listen: &mut dyn FnMut(&mut T, u32) -> ControlFlow<()>,
    ) -> Result<Vec<Ended<T>>, Error> {
        self.admit(engine);
        let wants: Vec<Wants> = self.running.iter().map(Member::wants).collect();
        let shares = self.fairness.rows(&wants, self.pass_rows);
        let vocab = engine.config().vocab_size;
        let mut parts = vec![];
        let mut logits_of = vec![];
        // Members whose next token this pass decides.
        let mut choosing = vec![];
        let mut row = 0;
        for (which, (member, rows)) in self.running.iter_mut().zip(shares).enumerate() {
            if rows == 0 {
                continue;
            }
            row += rows;
            let (part, chooses) = member.part(rows);
            parts.push(part);
            if chooses {
                logits_of.push(row - 1);
                choosing.push(which);
            }
        }
        if parts.is_empty() {
            return Ok(vec![]);
        }
        let logits = engine.pass(&mut parts, &logits_of, cancel, probe)?;
        let mut done = vec![];
        for (&which, logits) in choosing.iter().zip(logits.chunks_exact(vocab)) {
            let finish = self.running[which].choose(logits, listen);
            done.extend(finish.map(|finish| (which, finish)));
        }
        let leave = |(which, finish): &(usize, Finish)| self.running.remove(*which).end(*finish);
        // From the back, so that places stay right.
        let mut ended: Vec<Ended<T>> = done.iter().rev().map(leave).collect();
        ended.reverse();
        Ok(ended)
    }

    /// Lets waiting requests in as far as there is room.
    fn admit(&mut self, engine: &Engine) {
        while self.running.len() < self.limit {
            let Some((request, tag)) = self.waiting.pop_front() else {
                return;
            };
            self.running.push(Member {
                tag,
                sequence: engine.new_sequence(),
                sampler: Sampler::new(request.sampling),
                joined: Instant::now(),
                began: None,
                ids: vec![],
                request,
            });
        }
    }
}

impl<T> Member<T> {
    fn wants(&self) -> Wants {
        match self.request.prompt.len().saturating_sub(self.sequence.ids().len()) {
            0 => Wants::Decode,
            left => Wants::Prompt(left),
        }
    }

    /// Its next `rows` tokens, and whether a new token is chosen after them.
    fn part(&mut self, rows: usize) -> (PassRows<'_>, bool) {
        let fed = self.sequence.ids().len();
        let prompt = &self.request.prompt;
        let (ids, chooses) = match self.ids.last() {
            Some(last) => (std::slice::from_ref(last), true),
            None => (&prompt[fed..fed + rows], fed + rows == prompt.len()),
        };
        let sequence = &mut self.sequence;
        (PassRows { sequence, ids }, chooses)
    }

    /// Chooses the next token; says whether it was the last, and why.
    fn choose(&mut self, logits: &[f32], listen: &mut dyn FnMut(&mut T, u32) -> ControlFlow<()>) -> Option<Finish> {
        self.began.get_or_insert_with(Instant::now);
        let id = self.sampler.choose(logits);
        self.ids.push(id);
        if listen(&mut self.tag, id).is_break() || self.request.stop_ids.contains(&id) {
            Some(Finish::Stop)
        } else {
            (self.ids.len() == self.request.max_tokens).then_some(Finish::Length)
        }
    }

    fn end(self, finish: Finish) -> Ended<T> {
        let began = self.began.unwrap_or(self.joined);
        Ended {
            tag: self.tag,
            generated: Generated {
                ids: self.ids,
                finish,
                prefill_s: (began - self.joined).as_secs_f64(),
                decode_s: began.elapsed().as_secs_f64(),
            },
            sequence: self.sequence,
        }
    }
}
