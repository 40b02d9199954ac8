//! One answer: the tokens, the text, and what they cost.

use std::ops::ControlFlow;
use std::time::Instant;

use checkpoint::chat::{Effort, Message, Role};
use checkpoint::tokenizer::Tokenizer;
use engine::{
    Cancel, Engine, Finish, Generated, PrefixStore, Progress, PromptProgress, Request, Sequence, Transcript,
    TrunkFormat, human,
};
use serde::Serialize;

use crate::error::Error;
use crate::output::{self, Meter, Screen, grouped};
use crate::reads::Reads;
use crate::session;

/// An answer, in the words of `--json`.
#[derive(Debug, Serialize)]
pub struct Answer {
    pub prompt_ids: Vec<u32>,
    pub ids: Vec<u32>,
    pub text: String,
    pub reasoning: String,
    #[serde(serialize_with = "finish_name")]
    pub finish_reason: Finish,
    #[serde(serialize_with = "trunk_label")]
    pub trunk: TrunkFormat,
    pub stats: Stats,
}

/// What an answer cost. Times in seconds.
#[derive(Debug, Default, Serialize)]
pub struct Stats {
    /// Tokens fed before the first new one.
    pub prompt_tokens: usize,
    /// Tokens in front of those that a session file spared.
    pub session_tokens_restored: usize,
    /// Tokens in front of those that the prefix store spared.
    pub prefix_tokens_restored: usize,
    pub generated_tokens: usize,
    pub load_s: f64,
    /// Until the first new token.
    pub prefill_s: f64,
    /// From then on.
    pub decode_s: f64,
    pub passes: u64,
    /// Most rows that a pass may have: what memory allows, as far as it is of use.
    pub pass_rows: usize,
    pub expert_bytes_needed: u64,
    pub expert_bytes_cached: u64,
    pub expert_bytes_read: u64,
    pub device_bytes: u64,
    pub reads: Reads,
    /// The most that the process held; `None` where the system does not tell.
    pub peak_memory_bytes: Option<u64>,
}

fn finish_name<S: serde::Serializer>(finish: &Finish, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(finish.name())
}

/// The trunk in the words of every result.
pub fn trunk_label<S: serde::Serializer>(trunk: &TrunkFormat, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&trunk.label())
}

impl Answer {
    /// What there is when loading was interrupted.
    pub fn none(prompt_ids: Vec<u32>, trunk: TrunkFormat, load_s: f64) -> Self {
        Self {
            prompt_ids,
            ids: vec![],
            text: String::new(),
            reasoning: String::new(),
            finish_reason: Finish::Cancelled,
            trunk,
            stats: Stats {
                load_s,
                peak_memory_bytes: engine::peak_bytes(),
                ..Stats::default()
            },
        }
    }

    /// The table of `--stats`.
    pub fn table(&self) -> String {
        let trunk = match self.trunk.is_exact() {
            true => String::new(),
            false => format!("  {:<12} {}\n", "trunk", self.trunk.label()),
        };
        trunk + &self.stats.table()
    }

    /// The answer as a message of its conversation.
    pub fn message(&self, effort: Effort) -> Message {
        let mut message = Message::new(Role::Assistant, self.text.clone());
        message.reasoning = effort.thinks().then(|| self.reasoning.clone());
        message
    }

    pub fn json(&self) -> Result<String, Error> {
        let text = serde_json::to_string(self).map_err(|e| Error::Output(e.into()))?;
        Ok(text + "\n")
    }
}

/// A model, and states that it has kept.
pub struct Answerer<'a> {
    pub engine: &'a mut Engine,
    pub tokenizer: &'a Tokenizer,
    pub store: Option<PrefixStore>,
}

/// A sequence that has seen the beginning of a prompt.
pub struct Begun {
    pub sequence: Sequence,
    /// Tokens of it that came from the prefix store.
    pub from_store: usize,
}

impl Answerer<'_> {
    /// The sequence that has seen most of the beginning of `prompt`, but not all: `old`, one from the prefix store, or a new one.
    pub fn begin(&mut self, old: Option<Sequence>, prompt: &[u32]) -> Begun {
        // The old one is dropped before there is a new one: memory is set aside for one.
        let mut old = old.filter(|sequence| {
            let ids = sequence.ids();
            !sequence.is_spoilt() && ids.len() < prompt.len() && prompt.starts_with(ids)
        });
        if let Some(store) = &mut self.store {
            while let Some(session) = store.find(prompt, old.as_ref().map_or(0, |old| old.ids().len())) {
                old = None;
                if let Some(sequence) = store.restore(self.engine, session) {
                    let from_store = sequence.ids().len();
                    return Begun { sequence, from_store };
                }
            }
        }
        Begun {
            sequence: old.unwrap_or_else(|| self.engine.new_sequence()),
            from_store: 0,
        }
    }

    /// Continues what has begun by the request, showing the text as it comes. The prompt ids of the answer are those of
    /// the request.
    pub fn answer(
        &mut self,
        begun: &mut Begun,
        request: Request,
        transcript: Transcript,
        screen: &mut Screen<'_>,
        cancel: &Cancel,
    ) -> Result<Answer, Error> {
        let mut made = answer(self, &mut begun.sequence, request, transcript, screen, cancel)?;
        made.stats.prefix_tokens_restored = begun.from_store;
        if let Some(store) = &mut self.store {
            store.keep(self.engine, &begun.sequence);
        }
        session::pass_notices_on(self.store.as_mut());
        Ok(made)
    }
}

fn answer(
    with: &mut Answerer<'_>,
    sequence: &mut Sequence,
    mut request: Request,
    mut transcript: Transcript,
    screen: &mut Screen<'_>,
    cancel: &Cancel,
) -> Result<Answer, Error> {
    let (engine, tokenizer) = (&mut *with.engine, with.tokenizer);
    let (before, reads_before) = (engine.stats(), Reads::so_far(engine));
    let mut shown = Ok(());
    let mut meter = Meter::new();
    let of = request.prompt.len();
    let start = Instant::now();
    let rows = engine.plan().pass_rows;
    meter.show(|| format!("reading the prompt of {of} tokens"));
    let prompt_line = |PromptProgress { done, of, share }| {
        let passes = match of.div_ceil(rows) {
            1 => String::new(),
            passes => format!(" in {passes} passes, {done} done"),
        };
        let left = output::time_left_of_share(start, share);
        format!(
            "reading the prompt of {of} tokens{passes}: {:.0} %{left}",
            100.0 * share
        )
    };
    let prompt = request.prompt.clone();
    let fed = match &mut with.store {
        None => Ok(0),
        Some(store) => store.feed(engine, sequence, &prompt, cancel, &mut |progress| {
            meter.show(|| prompt_line(progress));
        }),
    };
    let fed_s = start.elapsed().as_secs_f64();
    let made = fed.and_then(|fed| {
        request.prompt.drain(..fed);
        engine.generate(sequence, &request, cancel, &mut |progress| match progress {
            Progress::Prompt(part) => {
                let share = (fed as f64 + part.share * part.of as f64) / of as f64;
                let done = fed + part.done;
                meter.show(|| prompt_line(PromptProgress { done, of, share }));
                ControlFlow::Continue(())
            }
            Progress::Token(id) => {
                meter.clear();
                let mut pieces = transcript.push(tokenizer, id).into_iter();
                shown = pieces.try_for_each(|piece| screen.show(&piece));
                match shown.is_err() || transcript.stopped() {
                    true => ControlFlow::Break(()),
                    false => ControlFlow::Continue(()),
                }
            }
        })
    });
    meter.clear();
    let made = match made {
        // While states of the prompt were kept.
        Err(engine::Error::Cancelled) => Generated {
            ids: vec![],
            finish: Finish::Cancelled,
            prefill_s: 0.0,
            decode_s: 0.0,
        },
        made => made?,
    };
    shown?;
    for piece in transcript.finish(tokenizer) {
        screen.show(&piece)?;
    }
    screen.end()?;
    // What is still read, for nobody, belongs to this answer's account.
    engine.settle();
    let (after, reads) = (engine.stats(), Reads::so_far(engine).since(&reads_before));
    Ok(Answer {
        stats: Stats {
            prompt_tokens: prompt.len(),
            session_tokens_restored: 0,
            prefix_tokens_restored: 0,
            generated_tokens: made.ids.len(),
            load_s: 0.0,
            prefill_s: fed_s + made.prefill_s,
            decode_s: made.decode_s,
            passes: after.passes - before.passes,
            pass_rows: rows,
            expert_bytes_needed: after.expert_bytes_needed - before.expert_bytes_needed,
            expert_bytes_cached: after.expert_bytes_cached - before.expert_bytes_cached,
            expert_bytes_read: after.expert_bytes_read - before.expert_bytes_read,
            device_bytes: after.device_bytes - before.device_bytes,
            reads,
            peak_memory_bytes: engine::peak_bytes(),
        },
        prompt_ids: prompt,
        ids: made.ids,
        text: transcript.text,
        reasoning: transcript.reasoning,
        finish_reason: made.finish,
        trunk: engine.trunk(),
    })
}

impl Stats {
    fn table(&self) -> String {
        let mut table = String::new();
        let mut row = |name: &str, value: String| table += &format!("  {name:<12} {value}\n");
        let times = |tokens: usize, passed: usize, seconds: f64| {
            let rate = match seconds > 0.0 {
                true => format!(", {:.2} tokens/s", passed as f64 / seconds),
                false => String::new(),
            };
            format!("{} tokens in {}{rate}", grouped(tokens as u64), output::span(seconds))
        };
        row("load", output::span(self.load_s));
        row("prompt", times(self.prompt_tokens, self.prompt_tokens, self.prefill_s));
        for (name, tokens) in [
            ("session", self.session_tokens_restored),
            ("prefix store", self.prefix_tokens_restored),
        ] {
            if tokens > 0 {
                row(name, format!("{} tokens restored", grouped(tokens as u64)));
            }
        }
        // The first token comes out of the prompt's pass.
        let decoded = self.generated_tokens.saturating_sub(1);
        row("generated", times(self.generated_tokens, decoded, self.decode_s));
        row(
            "passes",
            format!("{} of up to {} rows", grouped(self.passes), self.pass_rows),
        );
        let seconds = self.prefill_s + self.decode_s;
        for (name, bytes) in [
            ("needed", self.expert_bytes_needed),
            ("cached", self.expert_bytes_cached),
            ("read", self.expert_bytes_read),
            ("device", self.device_bytes),
        ] {
            let rate = match seconds > 0.0 {
                true => format!(", {:.2} GB/s", bytes as f64 / seconds / 1e9),
                false => String::new(),
            };
            row(name, format!("{} bytes ({}{rate})", grouped(bytes), human(bytes)));
        }
        self.reads.rows().into_iter().for_each(|(name, value)| row(name, value));
        match self.peak_memory_bytes {
            Some(bytes) => row("peak memory", format!("{} bytes ({})", grouped(bytes), human(bytes))),
            None => row("peak memory", "unknown on this system".to_owned()),
        }
        table + &self.reads.table()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_object_has_the_documented_fields() {
        let mut answer = Answer::none(vec![1, 2], TrunkFormat::Int8, 0.5);
        answer.stats.peak_memory_bytes = None;
        answer.text = "a\u{1F600}\n".into();
        let json: serde_json::Value = serde_json::from_str(&answer.json().unwrap()).unwrap();
        let expected = serde_json::json!({
            "prompt_ids": [1, 2], "ids": [], "text": "a\u{1F600}\n", "reasoning": "", "finish_reason": "cancelled", "trunk": "int8, not weight-exact",
            "stats": {"prompt_tokens": 0, "session_tokens_restored": 0, "prefix_tokens_restored": 0, "generated_tokens": 0, "load_s": 0.5, "prefill_s": 0.0, "decode_s": 0.0,
                "passes": 0, "pass_rows": 0,
                "expert_bytes_needed": 0, "expert_bytes_cached": 0, "expert_bytes_read": 0, "device_bytes": 0,
                "reads": {"account": {"device": 0, "needed": 0, "wasted": 0, "reread": 0, "pending": 0, "cached": 0},
                    "barriers": {"count": 0, "bound_s": 0.0, "time_s": 0.0}, "drives": []}, "peak_memory_bytes": null},
        });
        assert_eq!(json, expected);
    }

    #[test]
    fn the_table_has_rates() {
        let stats = Stats {
            prompt_tokens: 19,
            generated_tokens: 33,
            prefill_s: 2.0,
            decode_s: 8.0,
            expert_bytes_read: 20_000_000_000,
            ..Stats::default()
        };
        let table = stats.table();
        assert!(table.contains("19 tokens in 2.0 s, 9.50 tokens/s"), "{table}");
        assert!(table.contains("33 tokens in 8.0 s, 4.00 tokens/s"), "{table}");
        assert!(
            table.contains("read         20,000,000,000 bytes (18.6 GiB, 2.00 GB/s)"),
            "{table}"
        );
    }
}
