//! What 200,000 tokens of context cost: memory against the formula, a step's time against that of attention alone, and whether a
//! page that is added makes a step slow. The model is small in width, its state is random.
//!
//! `cargo run --release -p engine --features testing --example long_context -- f32|bf16 [FILE.json]`, in a process for each format, since
//! memory that was given back would not be counted.

use engine::{Cancel, Engine, Isa, KvFormat, Options, PassRows, Sequence, state_bytes};
use kernels::{ATTENTION_BLOCK, Backend, Cpu, Latents, MlaShape, Rows, Span};
use std::io::Read;
use std::time::Instant;

const TOKENS: usize = 200_000;
/// Pairs of steps, interleaved with attention alone.
const ROUNDS: usize = 25;
/// Steps in a row, over two page borders.
const GROWTH: usize = 2 * ATTENTION_BLOCK + 10;
/// Numbers of a cached row: a quarter of K3's 576.
const LATENT: usize = 128;
const SHARED: usize = 16;
const HEADS: usize = 8;

/// Random numbers from -1 to 1 as little-endian f32 or bf16.
struct Noise(u64, KvFormat);

impl Read for Noise {
    fn read(&mut self, to: &mut [u8]) -> std::io::Result<usize> {
        let size = self.1.bytes();
        for place in to.chunks_mut(size) {
            self.0 = self
                .0
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            let x = (self.0 >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
            place.copy_from_slice(&x.to_le_bytes()[4 - size..]);
        }
        Ok(to.len())
    }
}

fn resident_bytes() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<f64>().ok())
        .map_or(f64::NAN, |kib| kib * 1024.0)
}

fn seconds(work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    start.elapsed().as_secs_f64()
}

fn median(times: &[f64]) -> f64 {
    let mut times = times.to_vec();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn step(engine: &mut Engine, sequence: &mut Sequence) -> f64 {
    seconds(|| {
        let pass = &mut [PassRows { sequence, ids: &[7] }];
        engine.pass(pass, &[0], &Cancel::default(), None).expect("a step");
    })
}

/// Attention of one token over the caches of all layers, and nothing else.
struct Alone {
    cpu: Cpu,
    caches: Vec<Latents>,
    shape: MlaShape,
    q: Rows,
    y: Rows,
}

impl Alone {
    fn new(isa: Isa, threads: usize, layers: usize, kv: KvFormat) -> Self {
        let cpu = Cpu::new(isa, threads).expect("threads");
        let shape = MlaShape {
            heads: HEADS,
            nope: 32,
            shared: SHARED,
            value: 32,
            latent: LATENT,
        };
        let width = LATENT + SHARED;
        let caches = (0..layers).map(|layer| {
            let mut cache = cpu.latents(width, kv);
            let mut noise = Noise(layer as u64, kv);
            cpu.load_latents(&mut cache, TOKENS, &mut noise).expect("numbers");
            cache
        });
        let caches = caches.collect();
        let (mut q, y) = (cpu.act(1, HEADS * width), cpu.act(1, HEADS * LATENT));
        let mut noise = vec![0; HEADS * width * 2];
        Noise(99, KvFormat::Bf16).read_exact(&mut noise).expect("numbers");
        cpu.upload_bf16(&noise, &mut q);
        Self {
            cpu,
            caches,
            shape,
            q,
            y,
        }
    }

    fn run(&mut self) -> f64 {
        seconds(|| {
            for cache in &self.caches {
                let span = [Span { first: 0, rows: 1 }];
                self.cpu.attend(&self.q, self.shape, 0.1, &span, &[cache], &mut self.y);
            }
        })
    }
}

/// Memory against the formula at K3's own width, for 20,000 tokens of two layers.
fn memory_at_full_width(kv: KvFormat) -> f64 {
    const POSITIONS: usize = 20_000;
    let cpu = Cpu::new(Isa::detect(), 1).expect("a thread");
    let before = resident_bytes();
    let caches = [0, 1].map(|layer| {
        let mut cache = cpu.latents(576, kv);
        cpu.load_latents(&mut cache, POSITIONS, &mut Noise(layer, kv))
            .expect("numbers");
        cache
    });
    let measured = resident_bytes() - before;
    measured / (caches.len() as u64 * Latents::bytes(576, POSITIONS, kv)) as f64
}

fn main() {
    let mut args = std::env::args().skip(1);
    let named = args.next().unwrap_or_default();
    let kv = KvFormat::ALL.into_iter().find(|kv| kv.name() == named);
    let kv = kv.expect("f32 or bf16");
    let full_width = memory_at_full_width(kv);
    let folder = tempfile::tempdir().expect("a folder");
    let config = include_str!("../../checkpoint/testdata/k3-tiny-config.json");
    let mut config: serde_json::Value = serde_json::from_str(config).expect("JSON");
    for (name, value) in [
        ("kv_lora_rank", LATENT),
        ("qk_rope_head_dim", SHARED),
        ("num_attention_heads", HEADS),
        ("num_key_value_heads", HEADS),
        ("max_position_embeddings", 1 << 20),
    ] {
        config["text_config"][name] = value.into();
    }
    checkpoint::synthesize(&config.to_string(), 1, folder.path(), false, &mut |_| ()).expect("a model");
    let checkpoint = checkpoint::Checkpoint::open(folder.path()).expect("a model");
    let options = Options {
        memory: 8 << 30,
        positions: TOKENS + 2 * GROWTH,
        kv,
        ..Options::default()
    };
    let mut engine = Engine::open(checkpoint, &options, &mut |_| ()).expect("an engine");
    let c = engine.config().clone();
    let layers = (0..c.num_hidden_layers).filter(|&layer| c.is_mla(layer)).count();
    // The short one first: what both share is then there.
    let mut noise = Noise(5, kv);
    let mut short = engine.sequence_of(vec![7; ATTENTION_BLOCK], &mut noise).expect("state");
    step(&mut engine, &mut short);
    let before = resident_bytes();
    let mut long = engine.sequence_of(vec![7; TOKENS], &mut noise).expect("state");
    let measured = resident_bytes() - before;
    let formula = state_bytes(&c, TOKENS, kv) as f64;

    let mut alone = Alone::new(engine.isa(), engine.threads(), layers, kv);
    let (mut shorts, mut longs, mut kernels) = (vec![], vec![], vec![]);
    for _ in 0..ROUNDS {
        shorts.push(step(&mut engine, &mut short));
        kernels.push(alone.run());
        longs.push(step(&mut engine, &mut long));
    }
    drop(alone);
    let (rest, step_s, attention) = (median(&shorts), median(&longs), median(&kernels));
    let bytes = (TOKENS * layers * (LATENT + SHARED) * kv.bytes()) as f64;
    let flops = (2 * TOKENS * layers * HEADS * (2 * LATENT + SHARED)) as f64;

    let (mut usual, mut paging) = (vec![], vec![]);
    for _ in 0..GROWTH {
        let new_page = long.ids().len().is_multiple_of(ATTENTION_BLOCK);
        let took = step(&mut engine, &mut long);
        if new_page { &mut paging } else { &mut usual }.push(took);
    }
    let slowest = |times: &[f64]| times.iter().copied().fold(0.0, f64::max);
    let line = serde_json::json!({
        "kv": kv.name(), "tokens": TOKENS, "threads": engine.threads(), "isa": engine.isa().to_string(),
        "memory_bytes": measured, "formula_bytes": formula, "memory_to_formula": measured / formula,
        "memory_to_formula_at_full_width": full_width,
        "step_s": step_s, "rest_s": rest, "attention_s": attention, "explained": (rest + attention) / step_s,
        "attention_gb_per_s": bytes / attention / 1e9, "attention_gflop_per_s": flops / attention / 1e9,
        "usual_step_s": median(&usual), "slowest_usual_step_s": slowest(&usual),
        "slowest_step_with_a_new_page_s": slowest(&paging),
    });
    println!("{line}");
    if let Some(path) = args.next() {
        std::fs::write(path, format!("{line}\n")).expect("the results");
    }
}
