//! Latents kept in bf16: half the memory, one result whatever the company, and not far from f32's.

mod common;

use checkpoint::Checkpoint;
use checkpoint::tokenizer::Tokenizer;
use common::{Golden, assert_same, fed, largest_difference, open, plain_options};
use engine::{Isa, KvFormat, MemoryPlan, Options, Wishes};
use kernels::ATTENTION_BLOCK;
use std::path::Path;

/// How far the demo model's logits may be from those with f32 latents.
const NEAR: f32 = 0.05;
/// Tokens of a text: one block of attention and a little of the next.
const TOKENS: usize = ATTENTION_BLOCK + 7;

fn bf16() -> Options {
    Options {
        kv: KvFormat::Bf16,
        ..plain_options()
    }
}

#[test]
fn the_same_bits_in_any_company() {
    for name in ["k3_a", "k3_b"] {
        let golden = Golden::read(name);
        let ids = &golden.long_prompt[..TOKENS];
        let exact = fed(&mut open(&golden.dir, &plain_options()), ids, &[TOKENS]);
        let want = fed(&mut open(&golden.dir, &bf16()), ids, &[TOKENS]);
        assert_ne!(want, exact, "{name}: latents were not rounded");
        for isa in Isa::available() {
            let options = Options {
                isa,
                threads: 3,
                ..bf16()
            };
            let mut engine = open(&golden.dir, &options);
            let cuts: &[&[usize]] = match isa {
                Isa::Plain => &[&[61, 1, 2]],
                _ => &[&[1], &[61, 1, 2], &[ATTENTION_BLOCK]],
            };
            for cut in cuts {
                let got = fed(&mut engine, ids, cut);
                assert_same(&got, &want, &format!("{name}, {isa} in passes of {cut:?}"));
            }
        }
    }
}

/// The random models above route by a hair; the trained one shows what rounding does to a text.
#[test]
fn a_trained_model_says_the_same() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../demo/model");
    let text = "The captain looked out over the grey water and said nothing for a long time. Then he turned to the \
                mate, who had been watching him, and asked how far it was to the shore.";
    let ids = Tokenizer::load(&dir).unwrap().encode_ordinary(text);
    let logits = |options: Options| -> Vec<f32> {
        let bits = fed(&mut open(&dir, &options), &ids, &[ids.len()]);
        bits.into_iter().map(f32::from_bits).collect()
    };
    let (exact, rounded) = (logits(plain_options()), logits(bf16()));
    let far = largest_difference(&exact, &rounded);
    println!("largest difference of the demo model's logits {far:e}");
    assert!(far > 0.0 && far < NEAR, "{far}");
}

#[test]
fn a_token_of_context_takes_half_the_memory() {
    let dir = Golden::read("k3_a").dir;
    let state = |kv, positions| {
        let options = Options {
            kv,
            positions,
            ..plain_options()
        };
        open(&dir, &options).plan().state
    };
    let grown = |kv| state(kv, 4 * ATTENTION_BLOCK) - state(kv, ATTENTION_BLOCK);
    assert!(grown(KvFormat::Bf16) > 0);
    assert_eq!(grown(KvFormat::F32), 2 * grown(KvFormat::Bf16));
}

#[test]
fn the_tokens_that_fit_do_and_one_more_is_refused() {
    let checkpoint = Checkpoint::open(&Golden::read("k3_a").dir).unwrap();
    let (config, schema) = (checkpoint.config(), checkpoint.schema());
    for kv in KvFormat::ALL {
        let wishes = |positions, budget| Wishes {
            budget,
            positions,
            sequences: 1,
            pass_rows: 64,
            all_logits: false,
            slots: None,
            threads: 2,
            kv,
            trunk: engine::TrunkFormat::Bf16,
            cache: Some(0),
        };
        let plan = |positions, budget| MemoryPlan::new(config, schema, 1 << 20, &wishes(positions, budget));
        let least = MemoryPlan::least(config, schema, 1 << 20, &wishes(1, 0));
        assert_eq!(least.token * ATTENTION_BLOCK as u64, {
            let grown = MemoryPlan::least(config, schema, 1 << 20, &wishes(ATTENTION_BLOCK + 1, 0));
            grown.state - least.state
        });
        let most = |budget| MemoryPlan::most_positions(config, schema, 1 << 20, &wishes(1, budget));
        assert_eq!(most(least.total() - 1), 0);
        assert_eq!(most(u64::MAX), config.max_position_embeddings);
        let budget = least.total() + 5 * least.token * ATTENTION_BLOCK as u64 + 1;
        assert_eq!(most(budget), 6 * ATTENTION_BLOCK);
        assert!(plan(most(budget), budget).is_ok());
        let error = plan(most(budget) + 1, budget).unwrap_err().to_string();
        assert!(error.contains("context of 769 tokens, of which 768 fit"), "{error}");
    }
}
