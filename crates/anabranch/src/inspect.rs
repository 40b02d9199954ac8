//! `anabranch inspect`: what a folder holds, what is missing, and what memory the model needs.

use std::fmt::Write;

use checkpoint::{Class, K3Config, Schema, Sizes, Survey, survey};
use engine::{KvFormat, MemoryPlan, TrunkFormat, Wishes, human};
use serde_json::{Value, json};

use crate::error::Error;
use crate::model;
use crate::output::{self, grouped};
use crate::settings::Inspect;
use crate::signals::Interrupt;

/// The sequence that the memory tables are made for: tokens, and rows of its longest pass.
const TABLE_POSITIONS: usize = 4096;
const TABLE_PASS_ROWS: usize = 512;

/// Memory that machines come with, in GiB.
const MACHINES: [u64; 15] = [4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024];

pub fn inspect(settings: &Inspect, interrupt: &Interrupt) -> Result<(), Error> {
    let dir = {
        let _working = interrupt.working();
        model::folder(&settings.model)?
    };
    let survey = survey(&dir)?;
    let memory = settings.memory.unwrap_or_else(engine::default_budget);
    let needs = survey.config.as_ref().zip(survey.sizes).map(|(config, sizes)| {
        // Where experts are scattered, each of the six tensors may be a read of its own.
        let extents = if survey.experts_contiguous == survey.experts_found {
            1
        } else {
            6
        };
        Needs::new(config, sizes, extents, memory, settings.kv, settings.trunk)
    });
    let text = match settings.json {
        true => format!("{:#}\n", as_json(&survey, needs.as_ref())),
        false => as_text(&survey, needs.as_ref()),
    };
    output::print(&text)?;
    match survey.problem_count {
        0 => Ok(()),
        problems => Err(Error::Incomplete {
            path: dir,
            problems,
            next: match survey.bytes_to_come {
                0 => "see the list above".to_owned(),
                bytes => format!(
                    "see the list above; {} bytes ({}) are still to be downloaded",
                    grouped(bytes),
                    human(bytes)
                ),
            },
        }),
    }
}

/// What the model needs, and what fits.
struct Needs<'a> {
    config: &'a K3Config,
    sizes: Sizes,
    least: MemoryPlan,
    comfortable: MemoryPlan,
    given: Result<MemoryPlan, engine::Error>,
    memory: u64,
    /// Tokens of one sequence that fit this memory.
    most_positions: usize,
}

impl<'a> Needs<'a> {
    fn new(config: &'a K3Config, sizes: Sizes, extents: u64, memory: u64, kv: KvFormat, trunk: TrunkFormat) -> Self {
        let schema = Schema::new(config);
        let slot_bytes = engine::most_slot_bytes(sizes.one_expert, extents);
        let wishes = |budget| Wishes {
            budget,
            positions: TABLE_POSITIONS.min(config.max_position_embeddings),
            sequences: 1,
            pass_rows: TABLE_PASS_ROWS,
            all_logits: false,
            slots: None,
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            kv,
            trunk,
            cache: None,
        };
        let divide = |budget| MemoryPlan::new(config, &schema, slot_bytes, &wishes(budget));
        let least = MemoryPlan::least(config, &schema, slot_bytes, &wishes(0));
        Self {
            comfortable: divide(u64::MAX).unwrap_or_else(|_| least.clone()),
            given: divide(memory),
            most_positions: MemoryPlan::most_positions(config, &schema, slot_bytes, &wishes(memory)),
            config,
            sizes,
            least,
            memory,
        }
    }

    fn fixed_state(&self) -> u64 {
        engine::state_bytes(self.config, 0, self.least.kv)
    }

    /// Available memory at which the least fits and the reserve stays free.
    fn available(&self) -> u64 {
        engine::available_for_budget(self.least.total())
    }

    /// The smallest usual machine, in GiB, with that much available.
    fn machine(&self) -> Option<u64> {
        MACHINES.into_iter().find(|gib| gib << 30 >= self.available())
    }
}

fn as_text(survey: &Survey, needs: Option<&Needs<'_>>) -> String {
    let mut text = format!("{}\n", survey.dir.display());
    // Writing to a string cannot fail.
    let _ = match needs {
        Some(needs) => contents(&mut text, survey, needs)
            .and_then(|()| sizes(&mut text, survey, needs))
            .and_then(|()| memory(&mut text, needs)),
        None => writeln!(text, "  no usable config.json, so what belongs here is unknown"),
    }
    .and_then(|()| missing(&mut text, survey));
    text
}

fn contents(text: &mut String, survey: &Survey, needs: &Needs<'_>) -> std::fmt::Result {
    let c = needs.config;
    let mla = (0..c.num_hidden_layers).filter(|&layer| c.is_mla(layer)).count();
    writeln!(
        text,
        "  Kimi K3: {} layers ({} KDA, {mla} MLA), hidden size {}, vocabulary {}, up to {} tokens",
        c.num_hidden_layers,
        c.num_hidden_layers - mla,
        c.hidden_size,
        grouped(c.vocab_size as u64),
        grouped(c.max_position_embeddings as u64),
    )?;
    writeln!(
        text,
        "  experts: {} layers x {}, {} used for each token and layer, {} bytes each (MXFP4)",
        c.moe_layers(),
        c.num_experts,
        c.num_experts_per_token,
        grouped(needs.sizes.one_expert),
    )?;
    writeln!(
        text,
        "  found: {} of {} shards complete, {} experts ({} of them one read each)",
        survey.shards_complete(),
        survey.shards.len(),
        grouped(survey.experts_found as u64),
        grouped(survey.experts_contiguous as u64),
    )?;
    let by_dtype = survey.tensors_by_dtype.iter();
    let by_dtype: Vec<String> = by_dtype.map(|(dtype, n)| format!("{dtype} {}", grouped(*n))).collect();
    writeln!(
        text,
        "  tensors: {} ({})",
        grouped(survey.tensors()),
        by_dtype.join(", ")
    )
}

fn sizes(text: &mut String, survey: &Survey, needs: &Needs<'_>) -> std::fmt::Result {
    writeln!(text, "\nsizes, in bytes")?;
    let mut row = |name: &str, bytes| writeln!(text, "  {name:<20} {:>21}  {}", grouped(bytes), decimal(bytes));
    for class in Class::ALL {
        row(class.name(), needs.sizes.of(class))?;
    }
    row("= trunk", needs.sizes.trunk())?;
    row("routed experts", needs.sizes.experts)?;
    row("= text model", needs.sizes.trunk() + needs.sizes.experts)?;
    row("vision, not read", survey.vision_bytes)
}

fn memory(text: &mut String, needs: &Needs<'_>) -> std::fmt::Result {
    let positions = grouped(needs.least.positions as u64);
    writeln!(text, "\nmemory, for one sequence of up to {positions} tokens")?;
    writeln!(text, "  {:<10} {:>12} {:>14}", "", "the least", "comfortable")?;
    for ((name, least), (_, comfortable)) in needs.least.parts().into_iter().zip(needs.comfortable.parts()) {
        writeln!(text, "  {name:<10} {:>12} {:>14}", human(least), human(comfortable))?;
    }
    let (least, comfortable) = (needs.least.total(), needs.comfortable.total());
    writeln!(
        text,
        "  {:<10} {:>12} {:>14}",
        "in all",
        human(least),
        human(comfortable)
    )?;
    writeln!(
        text,
        "  the least is {} bytes: passes of one token, one expert in flight; comfortable: passes of {} tokens, {} experts",
        grouped(least),
        needs.comfortable.pass_rows,
        needs.comfortable.slot_count,
    )?;
    writeln!(
        text,
        "  a sequence's state: {} bytes, and {} bytes a token (latents in {})",
        grouped(needs.fixed_state()),
        grouped(needs.least.token),
        needs.least.kv,
    )?;
    writeln!(
        text,
        "  {} hold a context of up to {} tokens, with the least of everything else; the model goes up to {}",
        human(needs.memory),
        grouped(needs.most_positions as u64),
        grouped(needs.config.max_position_embeddings as u64),
    )?;
    let machine = match needs.machine() {
        Some(gib) => format!("a machine with {gib} GiB"),
        None => "no machine with 1 TiB or less".to_owned(),
    };
    let stored = match needs.least.trunk_format {
        TrunkFormat::Bf16 => String::new(),
        other => format!("; in memory {} as {}", decimal(needs.least.trunk), other.label()),
    };
    writeln!(
        text,
        "  the trunk is {} in bf16, of which the embedding stays on disk{stored}: {machine} could run it ({} available)",
        decimal(needs.sizes.trunk()),
        human(needs.available()),
    )?;
    match &needs.given {
        Ok(plan) => write!(text, "  of {} given here:\n{plan}", human(needs.memory)),
        Err(_) => writeln!(
            text,
            "  the {} given here are too little, by {} bytes",
            human(needs.memory),
            grouped(least - needs.memory.min(least)),
        ),
    }
}

fn missing(text: &mut String, survey: &Survey) -> std::fmt::Result {
    if survey.problem_count == 0 {
        return writeln!(text, "\nnothing is missing");
    }
    writeln!(
        text,
        "\nmissing or wrong: {} problems, {} bytes ({}) to come",
        grouped(survey.problem_count),
        grouped(survey.bytes_to_come),
        decimal(survey.bytes_to_come),
    )?;
    for problem in &survey.problems {
        writeln!(text, "  {problem}")?;
    }
    match survey.problem_count - survey.problems.len() as u64 {
        0 => Ok(()),
        more => writeln!(text, "  and {} more", grouped(more)),
    }
}

fn as_json(survey: &Survey, needs: Option<&Needs<'_>>) -> Value {
    let by_dtype: serde_json::Map<String, Value> = survey
        .tensors_by_dtype
        .iter()
        .map(|(dtype, n)| (dtype.name().to_owned(), json!(n)))
        .collect();
    let problems: Vec<String> = survey.problems.iter().map(ToString::to_string).collect();
    json!({
        "dir": survey.dir.to_string_lossy(),
        "shards": survey.shards.len(),
        "shards_complete": survey.shards_complete(),
        "tensors": survey.tensors(),
        "tensors_by_dtype": by_dtype,
        "experts_found": survey.experts_found,
        "experts_contiguous": survey.experts_contiguous,
        "vision_bytes": survey.vision_bytes,
        "bytes_to_come": survey.bytes_to_come,
        "problem_count": survey.problem_count,
        "problems": problems,
        "model": needs.map(model_json),
        "memory": needs.map(memory_json),
        "peak_memory_bytes": engine::peak_bytes(),
    })
}

fn model_json(needs: &Needs<'_>) -> Value {
    let c = needs.config;
    let classes: serde_json::Map<String, Value> = Class::ALL
        .iter()
        .map(|class| {
            (
                class.name().replace(' ', "_").to_lowercase(),
                json!(needs.sizes.of(*class)),
            )
        })
        .collect();
    json!({
        "family": "kimi_k3",
        "layers": c.num_hidden_layers,
        "moe_layers": c.moe_layers(),
        "experts": c.num_experts,
        "experts_per_token": c.num_experts_per_token,
        "vocabulary": c.vocab_size,
        "max_positions": c.max_position_embeddings,
        "bytes_by_class": classes,
        "trunk_bytes": needs.sizes.trunk(),
        "expert_bytes": needs.sizes.experts,
        "one_expert_bytes": needs.sizes.one_expert,
    })
}

fn memory_json(needs: &Needs<'_>) -> Value {
    let plan = |plan: &MemoryPlan| {
        let parts = plan
            .parts()
            .into_iter()
            .map(|(name, bytes)| (name.to_owned(), json!(bytes)));
        let mut parts: serde_json::Map<String, Value> = parts.collect();
        parts.insert("total".to_owned(), json!(plan.total()));
        parts.insert("pass_rows".to_owned(), json!(plan.pass_rows));
        parts.insert("slot_count".to_owned(), json!(plan.slot_count));
        Value::Object(parts)
    };
    json!({
        "positions": needs.least.positions,
        "kv": needs.least.kv.name(),
        "trunk": needs.least.trunk_format.label(),
        "least": plan(&needs.least),
        "comfortable": plan(&needs.comfortable),
        "given_bytes": needs.memory,
        "given": needs.given.as_ref().ok().map(plan),
        "state_fixed_bytes": needs.fixed_state(),
        "state_bytes_per_token": needs.least.token,
        "most_positions": needs.most_positions,
        "available_bytes": needs.available(),
        "machine_gib": needs.machine(),
    })
}

/// A size in powers of 1000, as drives and downloads are measured.
fn decimal(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "kB", "MB", "GB", "TB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1000.0 && unit + 1 < UNITS.len() {
        value /= 1000.0;
        unit += 1;
    }
    match unit {
        0 => format!("{bytes} B"),
        _ => format!("{value:.1} {}", UNITS[unit]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_in_powers_of_1000() {
        assert_eq!(decimal(999), "999 B");
        assert_eq!(decimal(113_509_540_864), "113.5 GB");
        assert_eq!(decimal(1_446_459_973_632), "1.4 TB");
    }
}
