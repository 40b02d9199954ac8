//! How far the jobs are, and what they cost.

use std::time::{Duration, Instant};

use engine::{Engine, Stats, TrunkFormat, human};
use serde::Serialize;

use crate::answer::trunk_label;
use crate::output::{self, Meter, grouped, span};
use crate::reads::Reads;

/// Between two lines of progress with `--verbose`.
const LINE_PAUSE: Duration = Duration::from_secs(30);

/// Sums of a run. Times in seconds, bytes of experts.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Summary {
    /// Lines of the input, blank ones left out.
    pub lines: u64,
    /// Of them, those that earlier runs had done.
    pub done_before: u64,
    /// Lines that have an answer or an error now, in earlier runs or this one, and those of them with an error.
    pub done: u64,
    pub errors: u64,
    /// How the resident matrices are stored, and whether that is weight-exact.
    #[serde(serialize_with = "trunk_label")]
    pub trunk: TrunkFormat,
    /// Of this run: tokens of prompts that were answered, and tokens generated for them.
    pub prompt_tokens: u64,
    pub generated_tokens: u64,
    pub load_s: f64,
    /// Without loading.
    pub time_s: f64,
    pub tokens_per_s: f64,
    /// Most sequences at one time, and most rows of a pass: what memory allows.
    pub sequences: usize,
    pub pass_rows: usize,
    pub passes: u64,
    /// Tokens that passes took, of prompts and of answers.
    pub rows: u64,
    pub expert_bytes_needed: u64,
    pub expert_bytes_cached: u64,
    pub expert_bytes_read: u64,
    pub device_bytes: u64,
    /// `expert_bytes_read` for each generated token.
    pub bytes_per_token: u64,
    pub reads: Reads,
    pub peak_memory_bytes: Option<u64>,
}

impl Summary {
    /// Takes what the engine counted.
    pub fn cost(&mut self, engine: &Engine) {
        let stats = engine.stats();
        self.load_s = engine.load_s();
        self.pass_rows = engine.plan().pass_rows;
        self.passes = stats.passes;
        self.rows = stats.rows;
        self.expert_bytes_needed = stats.expert_bytes_needed;
        self.expert_bytes_cached = stats.expert_bytes_cached;
        self.expert_bytes_read = stats.expert_bytes_read;
        self.device_bytes = stats.device_bytes;
        self.bytes_per_token = stats.expert_bytes_read / self.generated_tokens.max(1);
        self.tokens_per_s = match self.time_s > 0.0 {
            true => self.generated_tokens as f64 / self.time_s,
            false => 0.0,
        };
    }

    /// What is always said at the end.
    pub fn text(&self) -> String {
        let earlier = match self.done_before {
            0 => String::new(),
            before => format!(", {} of them in earlier runs", grouped(before)),
        };
        let mut text = format!(
            "{} of {} lines are done{earlier}; {} have an error",
            grouped(self.done),
            grouped(self.lines),
            grouped(self.errors)
        );
        if self.passes > 0 {
            text += &format!(
                "\n{} tokens generated in {} ({:.2} tokens/s) for prompts of {} tokens\n\
                 {} passes of up to {} rows, {} sequences at most; {} of experts read, {} for each generated token",
                grouped(self.generated_tokens),
                span(self.time_s),
                self.tokens_per_s,
                grouped(self.prompt_tokens),
                grouped(self.passes),
                grouped(self.pass_rows as u64),
                grouped(self.sequences as u64),
                human(self.expert_bytes_read),
                human(self.bytes_per_token)
            );
        }
        if !self.trunk.is_exact() {
            text += &format!("\ntrunk: {}", self.trunk.label());
        }
        text
    }

    /// What `--stats` adds.
    pub fn table(&self) -> String {
        let mut table = String::new();
        let mut row = |name: &str, value: String| table += &format!("  {name:<12} {value}\n");
        row("load", span(self.load_s));
        for (name, bytes) in [
            ("needed", self.expert_bytes_needed),
            ("cached", self.expert_bytes_cached),
            ("read", self.expert_bytes_read),
            ("device", self.device_bytes),
        ] {
            row(name, format!("{} bytes ({})", grouped(bytes), human(bytes)));
        }
        self.reads.rows().into_iter().for_each(|(name, value)| row(name, value));
        if let Some(bytes) = self.peak_memory_bytes {
            row("peak memory", format!("{} bytes ({})", grouped(bytes), human(bytes)));
        }
        table + &self.reads.table()
    }
}

/// Shows progress: on a terminal all the time, with `--verbose` in lines as well.
pub struct Progress {
    meter: Meter,
    verbose: bool,
    said: Instant,
    started: Instant,
    layers: usize,
    now: State,
}

/// What is shown.
#[derive(Clone, Copy, Debug, Default)]
struct State {
    lines: u64,
    left: u64,
    running: usize,
    /// Lines that this run has answered, and their tokens.
    answered: u64,
    answered_tokens: u64,
    /// Tokens that the running sequences have.
    running_tokens: u64,
    stats: Stats,
}

impl Progress {
    pub fn new(engine: &Engine, verbose: bool) -> Self {
        Self {
            meter: Meter::new(),
            verbose,
            said: Instant::now(),
            started: Instant::now(),
            layers: engine.config().num_hidden_layers,
            now: State::default(),
        }
    }

    /// Seconds since the start.
    pub fn seconds(&self) -> f64 {
        self.started.elapsed().as_secs_f64()
    }

    /// Between two passes.
    pub fn update(&mut self, summary: &Summary, answered: u64, running: usize, running_tokens: usize, stats: Stats) {
        self.now = State {
            lines: summary.lines,
            left: summary.lines - summary.done,
            running,
            answered,
            answered_tokens: summary.generated_tokens,
            running_tokens: running_tokens as u64,
            stats,
        };
        if self.verbose && self.said.elapsed() >= LINE_PAUSE {
            self.said = Instant::now();
            self.meter.clear();
            output::say(self.now.text(self.started.elapsed()));
        }
    }

    /// Inside a pass, after a layer.
    pub fn layer(&mut self, layer: usize) {
        let (now, started, layers) = (self.now, self.started, self.layers);
        self.meter.show(|| {
            let pass = now.stats.passes + 1;
            format!(
                "{}; pass {pass}, layer {} of {layers}",
                now.text(started.elapsed()),
                layer + 1
            )
        });
    }
}

impl State {
    fn text(&self, elapsed: Duration) -> String {
        let tokens = self.answered_tokens + self.running_tokens;
        let mut text = format!(
            "{} of {} lines done, {} running",
            grouped(self.lines - self.left),
            grouped(self.lines),
            self.running
        );
        if tokens > 0 {
            text += &format!(
                ", {} tokens, {:.2} tokens/s, {} a token",
                grouped(tokens),
                tokens as f64 / elapsed.as_secs_f64(),
                human(self.stats.expert_bytes_read / tokens)
            );
        }
        match self.seconds_left(elapsed) {
            Some(seconds) => text + &format!(", {} left", span(seconds)),
            None => text,
        }
    }

    /// If the lines that are left become as long as those that were answered; nothing before the first.
    fn seconds_left(&self, elapsed: Duration) -> Option<f64> {
        let per_line = (self.answered > 0).then(|| self.answered_tokens as f64 / self.answered as f64)?;
        let left = (self.left as f64 * per_line - self.running_tokens as f64).max(0.0);
        let made = (self.answered_tokens + self.running_tokens) as f64;
        Some(elapsed.as_secs_f64() * left / made)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_estimate_counts_what_is_under_way() {
        let mut state = State {
            lines: 100,
            left: 90,
            running: 4,
            answered: 10,
            answered_tokens: 200,
            running_tokens: 40,
            stats: Stats::default(),
        };
        // 90 lines of 20 tokens, of which 40 tokens are made; 240 tokens took 24 s.
        assert_eq!(state.seconds_left(Duration::from_secs(24)), Some(176.0));
        let text = state.text(Duration::from_secs(24));
        assert!(
            text.starts_with("10 of 100 lines done, 4 running, 240 tokens, 10.00 tokens/s"),
            "{text}"
        );
        assert!(text.ends_with(", 2 min 56 s left"), "{text}");
        state.answered = 0;
        assert_eq!(state.seconds_left(Duration::from_secs(24)), None);
    }
}
