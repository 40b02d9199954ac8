//! Long prompts on the demo model: every pass asks for an expert once a layer, and nothing is read twice.

mod common;

use common::{open, plain_options};
use engine::{Cancel, Options};
use std::path::Path;

const PASS_ROWS: usize = 512;

#[test]
fn fifteen_hundred_tokens_are_read_once_a_pass() {
    read_once_a_pass(1500);
}

#[test]
#[ignore = "half a minute; make long-context"]
fn eight_thousand_tokens_are_read_once_a_pass() {
    read_once_a_pass(8000);
}

fn read_once_a_pass(tokens: usize) {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../demo");
    let text = std::fs::read_to_string(demo.join("openings.txt")).unwrap()
        + &std::fs::read_to_string(demo.join("README.md")).unwrap();
    let tokenizer = checkpoint::tokenizer::Tokenizer::load(&demo.join("model")).unwrap();
    let ids: Vec<u32> = tokenizer
        .encode_ordinary(&text)
        .into_iter()
        .cycle()
        .take(tokens)
        .collect();
    let options = Options {
        positions: tokens,
        pass_rows: PASS_ROWS,
        // Every pass reads what it needs.
        cache: Some(0),
        ..plain_options()
    };
    let mut engine = open(&demo.join("model"), &options);
    assert_eq!(engine.plan().pass_rows, PASS_ROWS);
    let mut sequence = engine.new_sequence();
    engine
        .prefill(&mut sequence, &ids, &Cancel::default(), &mut |_| ())
        .unwrap();
    let stats = engine.stats();
    let passes = tokens.div_ceil(PASS_ROWS) as u64;
    assert_eq!((stats.passes, stats.rows), (passes, tokens as u64));
    assert_eq!(
        stats.expert_bytes_read, stats.expert_bytes_needed,
        "read amplification is 1"
    );
    let c = engine.config();
    let all = (c.moe_layers() * c.num_experts) as u64 * engine.checkpoint().max_expert_bytes();
    println!(
        "{:.3} of all experts in a pass",
        stats.expert_bytes_needed as f64 / (passes * all) as f64
    );
    assert!(stats.expert_bytes_needed <= passes * all);
    // 512 rows need nearly all of them.
    assert!(stats.expert_bytes_needed > passes * all / 2);
}
