//! `anabranch trace routing`: how a model routes, and what drafts from repetition would gain.

use std::fmt::Write;
use std::time::Instant;

use engine::{Cancel, Engine, PassRows, TrunkFormat, greedy};
use instruments::{DraftCounts, LayerRouting, Ngram, Ratio, RoutingTally, top_share};
use serde_json::{Value, json};

use super::texts;
use crate::error::Error;
use crate::model::{self, Needs};
use crate::output::{self, Meter, grouped, percent};
use crate::settings::{Experts, Routing};
use crate::signals::Interrupt;

/// The part of a layer's experts whose share of the reads is shown.
const TOP: f64 = 0.1;
/// The drafts that are counted.
const NGRAM: Ngram = Ngram { matched: 2, longest: 6 };

pub fn routing(settings: &Routing, interrupt: &Interrupt) -> Result<(), Error> {
    let _working = interrupt.working();
    let dir = model::folder(&settings.model)?;
    let (checkpoint, texts) = texts::with_model(&dir, &settings.texts)?;
    let longest = texts.iter().map(Vec::len).max().unwrap_or(0);
    let needs = Needs {
        positions: longest.saturating_add(settings.max_tokens),
        pass_rows: longest,
        sequences: 1,
        all_logits: false,
    };
    let mut engine = model::load(
        checkpoint,
        &Experts::Folders(vec![]),
        &settings.machine,
        &needs,
        interrupt,
    )?;
    let c = engine.config();
    let top_k = c.num_experts_per_token;
    let mut report = Report {
        texts: texts.len(),
        tokens: 0,
        experts: c.num_experts,
        top_k,
        widths: [top_k, 2 * top_k].map(|width| width.min(c.num_experts)),
        layers: vec![],
        trunk: engine.trunk(),
        drafts: DraftCounts::default(),
    };
    let mut tally = RoutingTally::new(report.experts, &report.widths);
    let mut meter = Meter::new();
    let start = Instant::now();
    for (number, prompt) in texts.iter().enumerate() {
        meter.show(|| {
            let left = output::time_left(start, number as u64, texts.len() as u64);
            format!("text {} of {}{left}", number + 1, texts.len())
        });
        let ids = follow(&mut engine, prompt, settings.max_tokens, &mut tally, interrupt.cancel())?;
        let added = ids.len() - prompt.len();
        // The last new token is chosen and not fed.
        report.tokens += ids.len() - added.min(1);
        let given = if settings.max_tokens > 0 { prompt.len() } else { 1 };
        report.drafts += NGRAM.replay(&ids, given);
    }
    meter.clear();
    model::pass_notices_on(&engine);
    report.layers = tally.layers().to_vec();
    output::print(&match settings.json {
        true => format!("{:#}\n", report.json()),
        false => report.markdown(),
    })
}

/// Runs a text through the model and lets the model go on, watched by the tally. Returns all ids.
fn follow(
    engine: &mut Engine,
    prompt: &[u32],
    max_tokens: usize,
    tally: &mut RoutingTally,
    cancel: &Cancel,
) -> Result<Vec<u32>, Error> {
    tally.begin_sequence();
    let stop_ids = engine.checkpoint().stop_ids().to_vec();
    let rows = engine.plan().pass_rows;
    let mut sequence = engine.new_sequence();
    let mut feed = |part: &[u32]| {
        let pass = &mut [PassRows {
            sequence: &mut sequence,
            ids: part,
        }];
        engine.pass(pass, &[part.len() - 1], cancel, Some(&mut *tally))
    };
    let mut ids = prompt.to_vec();
    let mut logits = vec![];
    for part in prompt.chunks(rows) {
        logits = feed(part)?;
    }
    while ids.len() < prompt.len() + max_tokens {
        let id = greedy(&logits);
        ids.push(id);
        if stop_ids.contains(&id) || ids.len() == prompt.len() + max_tokens {
            break;
        }
        logits = feed(&[id])?;
    }
    Ok(ids)
}

/// What is shown.
struct Report {
    texts: usize,
    /// Tokens that went through the model.
    tokens: usize,
    experts: usize,
    top_k: usize,
    widths: [usize; 2],
    layers: Vec<LayerRouting>,
    trunk: TrunkFormat,
    drafts: DraftCounts,
}

/// The shares of one line.
struct Shares {
    top_tenth: Option<f64>,
    repeat: Option<f64>,
    recall: [Option<f64>; 2],
}

impl Shares {
    fn of_layer(layer: &LayerRouting) -> Self {
        Self {
            top_tenth: top_share(&layer.reads, TOP),
            repeat: layer.repeat.value(),
            recall: [0, 1].map(|width| layer.recall[width].value()),
        }
    }
}

impl Report {
    /// The mean over the layers.
    fn all(&self) -> Shares {
        let sum = |ratio: &dyn Fn(&LayerRouting) -> Ratio| Ratio::sum(self.layers.iter().map(ratio)).value();
        let tops: Option<Vec<f64>> = self.layers.iter().map(|l| top_share(&l.reads, TOP)).collect();
        Shares {
            top_tenth: tops
                .filter(|tops| !tops.is_empty())
                .map(|tops| tops.iter().sum::<f64>() / tops.len() as f64),
            repeat: sum(&|l| l.repeat),
            recall: [0, 1].map(|width| sum(&|l| l.recall[width])),
        }
    }

    /// What even and independent routes would give.
    fn chance(&self) -> Shares {
        let share = |width: usize| Some(width as f64 / self.experts as f64);
        Shares {
            top_tenth: Some(TOP),
            repeat: share(self.top_k),
            recall: self.widths.map(share),
        }
    }

    fn markdown(&self) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = self.write_markdown(&mut text);
        text
    }

    fn write_markdown(&self, text: &mut String) -> std::fmt::Result {
        let [width, wide] = self.widths;
        let trunk = match self.trunk.is_exact() {
            true => String::new(),
            false => format!(" Trunk {}.", self.trunk.label()),
        };
        writeln!(
            text,
            "{}, {} tokens through the model; {} layers of {} experts, {} a token.{trunk}\n",
            counted(self.texts, "text"),
            grouped(self.tokens as u64),
            self.layers.len(),
            self.experts,
            self.top_k
        )?;
        writeln!(
            text,
            "| layer | top tenth | repeat | recall at {width} | recall at {wide} |"
        )?;
        writeln!(text, "|---|---:|---:|---:|---:|")?;
        let mut line = |name: &str, shares: &Shares| {
            let cells = [shares.top_tenth, shares.repeat, shares.recall[0], shares.recall[1]].map(percent);
            writeln!(text, "| {name} | {} |", cells.join(" | "))
        };
        for layer in &self.layers {
            line(&layer.layer.to_string(), &Shares::of_layer(layer))?;
        }
        line("all", &self.all())?;
        line("by chance", &self.chance())?;
        let d = &self.drafts;
        writeln!(
            text,
            "\nN-gram drafts of up to {} tokens after a match of {}:\n",
            NGRAM.longest, NGRAM.matched
        )?;
        writeln!(
            text,
            "| steps | with a draft | drafted tokens | accepted | of drafted | accepted a step |"
        )?;
        writeln!(text, "|---:|---:|---:|---:|---:|---:|")?;
        let counts = [d.steps, d.steps_with_draft, d.drafted, d.accepted].map(grouped);
        let mean = d.accepted_a_step().map_or("-".to_owned(), |mean| format!("{mean:.2}"));
        writeln!(
            text,
            "| {} | {} | {mean} |",
            counts.join(" | "),
            percent(d.acceptance())
        )
    }

    fn json(&self) -> Value {
        let shares = |shares: Shares| {
            let recall = self.widths.iter().zip(shares.recall);
            json!({
                "top_tenth": shares.top_tenth,
                "repeat": shares.repeat,
                "recall": recall.map(|(width, share)| json!({"width": width, "share": share})).collect::<Vec<_>>(),
            })
        };
        let layer = |layer: &LayerRouting| {
            let mut object = shares(Shares::of_layer(layer));
            object["layer"] = layer.layer.into();
            object["reads"] = layer.reads.clone().into();
            object
        };
        let d = &self.drafts;
        json!({
            "texts": self.texts,
            "tokens": self.tokens,
            "trunk": self.trunk.label(),
            "experts": self.experts,
            "experts_per_token": self.top_k,
            "layers": self.layers.iter().map(layer).collect::<Vec<_>>(),
            "all": shares(self.all()),
            "by_chance": shares(self.chance()),
            "ngram": {
                "matched": NGRAM.matched,
                "longest": NGRAM.longest,
                "steps": d.steps,
                "steps_with_draft": d.steps_with_draft,
                "drafted": d.drafted,
                "accepted": d.accepted,
                "acceptance": d.acceptance(),
                "accepted_a_step": d.accepted_a_step(),
            },
        })
    }
}

fn counted(n: usize, what: &str) -> String {
    match n {
        1 => format!("1 {what}"),
        _ => format!("{} {what}s", grouped(n as u64)),
    }
}
