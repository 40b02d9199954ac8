//! A whole model whose experts are all in memory, against what the machine gives: decoding against the bytes that a token touches and
//! memory's read bandwidth, a prompt against its operations and the multiply-add peak, all measured in one run, in turn. The model counts
//! with its median, the machine with its best reading (`floors`) and, beside it, with its middle one.
//!
//! `cargo run --release -p engine --example bench_model -- MODEL OUT.json [THREADS]` or `make bench-model`.

#[path = "../../kernels/examples/floors/mod.rs"]
mod floors;

use checkpoint::{Checkpoint, Class};
use engine::{Cancel, Engine, Options, PassRows, Sequence, greedy};
use floors::{Floors, PROBE_BYTES, median, seconds};
use std::path::Path;

/// Tokens of the prompt.
const PROMPT: usize = 512;
/// Tokens decoded in each round.
const DECODED: usize = 16;
const ROUNDS: usize = 5;
/// Readings of the machine's limits in a round.
const READINGS: usize = 3;
/// Stored bytes of a weight, and operations for it: a multiplication and an addition.
const BF16_BYTES: f64 = 2.0;
const MXFP4_BYTES: f64 = 0.5 + 1.0 / 32.0;
const OPERATIONS: f64 = 2.0;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// What a token costs.
struct Cost {
    bytes: f64,
    operations: f64,
    /// Of these, the logits'.
    logits: f64,
}

impl Cost {
    fn of(checkpoint: &Checkpoint) -> Self {
        let (c, sizes) = (checkpoint.config(), checkpoint.sizes());
        let trunk = (sizes.trunk() - sizes.of(Class::Embedding)) as f64;
        let routed = (c.moe_layers() * c.num_experts_per_token) as f64 * sizes.one_expert as f64;
        Self {
            bytes: trunk + routed,
            operations: OPERATIONS * (trunk / BF16_BYTES + routed / MXFP4_BYTES),
            logits: OPERATIONS * (c.vocab_size * c.hidden_size) as f64,
        }
    }

    /// A prompt's logits are computed for its last row only.
    fn prompt_operations(&self) -> f64 {
        PROMPT as f64 * (self.operations - self.logits) + self.logits
    }
}

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let usage = "usage: bench_model MODEL OUT.json [THREADS]";
    let model = args.next().ok_or(usage)?;
    let out = args.next().ok_or(usage)?;
    let checkpoint = Checkpoint::open(Path::new(&model))?;
    let cost = Cost::of(&checkpoint);
    let usual = Options::default();
    let options = Options {
        positions: PROMPT + DECODED + 1,
        // The probe's memory is not the engine's.
        memory: usual.memory.saturating_sub(PROBE_BYTES as u64),
        threads: args.next().map_or(Ok(usual.threads), |text| text.parse())?,
        ..usual
    };
    let mut engine = Engine::open(checkpoint, &options, &mut |_| ())?;
    let c = engine.config().clone();
    let (experts, found) = (c.moe_layers() * c.num_experts, engine.plan().cache_slots);
    if found < experts {
        return Err(format!("memory holds {found} of {experts} experts, all are needed; take a smaller model").into());
    }
    let ids: Vec<u32> = (0..PROMPT)
        .map(|i| ((i * 2_654_435 + 77) % c.vocab_size) as u32)
        .collect();
    let mut floors = Floors::new();
    println!(
        "{model}: {} kernels on {} threads; a token touches {:.3} GB and takes {:.2} GFLOP",
        engine.isa(),
        engine.threads(),
        cost.bytes / 1e9,
        cost.operations / 1e9
    );
    // What these tokens need is in memory from then on.
    round(&mut engine, &ids)?;
    let (isa, threads) = (engine.isa(), engine.threads());
    let mut rounds = vec![];
    for number in 1..=ROUNDS {
        for _ in 0..READINGS {
            floors.read(threads);
            floors.multiply(isa, threads);
        }
        let before = engine.stats().expert_bytes_read;
        let (prompt_s, decode_s) = round(&mut engine, &ids)?;
        let read = engine.stats().expert_bytes_read - before;
        let (prompt_rate, decode_rate) = (PROMPT as f64 / prompt_s, DECODED as f64 / decode_s);
        println!(
            "round {number}: decoding {decode_rate:.2} tokens/s, a prompt of {PROMPT} {prompt_rate:.1} tokens/s, {read} bytes of experts read"
        );
        rounds.push((prompt_rate, decode_rate, read));
    }
    let (bandwidth, peak) = (floors.bandwidth(threads), floors.peak(isa, threads));
    let (middle_bandwidth, middle_peak) = floors.middle(isa, threads);
    let decode_share = |rate: f64| rate * cost.bytes / bandwidth;
    let prompt_share = |rate: f64| cost.prompt_operations() * rate / PROMPT as f64 / peak;
    let line = |&(prompt, decode, read): &(f64, f64, u64)| {
        format!(
            "{{\"isa\":\"{isa}\",\"threads\":{threads},\"decode_tokens_per_s\":{decode:.3},\"decode_share\":{:.4},\
             \"prompt_tokens_per_s\":{prompt:.3},\"prompt_share\":{:.4},\"read_gb_per_s\":{:.2},\
             \"fma_gflop_per_s\":{:.1},\"middle_read_gb_per_s\":{:.2},\"middle_fma_gflop_per_s\":{:.1},\"token_bytes\":{},\"token_operations\":{},\"expert_bytes_read\":{read}}}",
            decode_share(decode),
            prompt_share(prompt),
            bandwidth / 1e9,
            peak / 1e9,
            middle_bandwidth / 1e9,
            middle_peak / 1e9,
            cost.bytes,
            cost.operations
        )
    };
    let lines: Vec<String> = rounds.iter().map(line).collect();
    let decode = median(rounds.iter().map(|round| round.1).collect());
    let prompt = median(rounds.iter().map(|round| round.0).collect());
    println!(
        "medians: decoding {decode:.2} tokens/s, {:.1} % of {:.1} GB/s; a prompt {prompt:.1} tokens/s, {:.1} % of {:.0} GFLOP/s",
        decode_share(decode) * 100.0,
        bandwidth / 1e9,
        prompt_share(prompt) * 100.0,
        peak / 1e9
    );
    println!(
        "of the middle readings, {:.1} GB/s and {:.0} GFLOP/s: {:.1} % and {:.1} %",
        middle_bandwidth / 1e9,
        middle_peak / 1e9,
        decode_share(decode) * bandwidth / middle_bandwidth * 100.0,
        prompt_share(prompt) * peak / middle_peak * 100.0
    );
    std::fs::write(&out, format!("[\n{}\n]\n", lines.join(",\n")))?;
    println!("raw data: {out}");
    Ok(())
}

/// A prompt and an answer: the seconds of each.
fn round(engine: &mut Engine, ids: &[u32]) -> Result<(f64, f64)> {
    let mut sequence = engine.new_sequence();
    let mut logits = Ok(vec![]);
    let prompt_s = seconds(|| logits = engine.prefill(&mut sequence, ids, &Cancel::default(), &mut |_| ()));
    let first = greedy(&logits?);
    let mut last = Ok(first);
    let decode_s = seconds(|| last = (0..DECODED).try_fold(first, |id, _| step(engine, &mut sequence, id)));
    last?;
    Ok((prompt_s, decode_s))
}

fn step(engine: &mut Engine, sequence: &mut Sequence, id: u32) -> std::result::Result<u32, engine::Error> {
    let part = &mut [PassRows { sequence, ids: &[id] }];
    let logits = engine.pass(part, &[0], &Cancel::default(), None)?;
    Ok(greedy(&logits))
}
