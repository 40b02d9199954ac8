//! The same bits, whatever the company: passes of any size, any number of threads, every kernel form, any arena, batches.

mod common;

use common::{Golden, Random, assert_same, bits, fed, open, plain_options, tiny};
use engine::{Cancel, Isa, Options, PassRows, PromptProgress};
use kernels::ATTENTION_BLOCK;
use std::path::PathBuf;
use tempfile::TempDir;

/// Tokens of a text: one block of attention and a little of the next.
const TOKENS: usize = ATTENTION_BLOCK + 7;

/// A model and a text.
struct Case {
    dir: PathBuf,
    ids: Vec<u32>,
    _owned: Option<TempDir>,
}

fn cases() -> [Case; 3] {
    let dir = tiny();
    let mut random = Random(1);
    let random = Case {
        dir: dir.path().to_owned(),
        ids: (0..TOKENS).map(|_| random.below(512) as u32).collect(),
        _owned: Some(dir),
    };
    [golden("k3_a"), golden("k3_b"), random]
}

fn golden(name: &str) -> Case {
    let golden = Golden::read(name);
    Case {
        dir: golden.dir,
        ids: golden.long_prompt[..TOKENS].to_vec(),
        _owned: None,
    }
}

/// Everything in one pass, as the other runs must give it.
fn want(case: &Case) -> Vec<u32> {
    fed(&mut open(&case.dir, &plain_options()), &case.ids, &[case.ids.len()])
}

#[test]
fn passes_of_any_size_and_token_by_token() {
    for case in cases() {
        let want = want(&case);
        let mut engine = open(&case.dir, &plain_options());
        let mut sizes = [1, 2, 3, 5, 7, ATTENTION_BLOCK - 1, ATTENTION_BLOCK]
            .map(|size| vec![size])
            .to_vec();
        for seed in 0..3 {
            let mut random = Random(seed);
            sizes.push((0..TOKENS).map(|_| 1 + random.below(40)).collect());
        }
        for sizes in sizes {
            let got = fed(&mut engine, &case.ids, &sizes);
            assert_same(&got, &want, &format!("{:?} in passes of {sizes:?}", case.dir));
        }
    }
}

#[test]
fn any_number_of_threads_and_every_kernel_form() {
    const UNEVEN: [usize; 4] = [61, 1, 1, 2];
    for case in cases() {
        let want = want(&case);
        for isa in Isa::available() {
            for threads in [1, 2, 3] {
                let options = Options {
                    isa,
                    threads,
                    ..plain_options()
                };
                let mut engine = open(&case.dir, &options);
                // The plain form takes ten times as long as the others.
                let runs: &[&[usize]] = match (isa, threads) {
                    (Isa::Plain, 1) => &[&[TOKENS]],
                    (Isa::Plain, 2) => &[],
                    (Isa::Plain, _) => &[&UNEVEN],
                    _ => &[&[TOKENS], &UNEVEN],
                };
                for sizes in runs {
                    let got = fed(&mut engine, &case.ids, sizes);
                    let what = format!("{:?}, {isa} on {threads} threads in passes of {sizes:?}", case.dir);
                    assert_same(&got, &want, &what);
                }
            }
        }
    }
}

#[test]
fn the_smallest_and_the_largest_arena() {
    for case in cases() {
        let want = want(&case);
        // Nothing stays, some 10 experts of a few kilobytes do, everything does.
        for (slots, cache) in [(1, Some(0)), (64, Some(0)), (1, Some(100_000)), (64, None)] {
            let options = Options {
                slots: Some(slots),
                cache,
                ..plain_options()
            };
            let mut engine = open(&case.dir, &options);
            assert_eq!(engine.plan().slot_count, slots);
            for sizes in [TOKENS, 3] {
                let got = fed(&mut engine, &case.ids, &[sizes]);
                let what = format!("{:?}, {slots} slots, cache of {cache:?}, passes of {sizes:?}", case.dir);
                assert_same(&got, &want, &what);
            }
            let stats = engine.stats();
            assert_eq!(
                stats.expert_bytes_read + stats.expert_bytes_cached,
                stats.expert_bytes_needed
            );
            assert_eq!(stats.expert_bytes_cached > 0, engine.plan().cache_slots > 0);
            assert_eq!(engine.plan().cache_slots > 0, cache != Some(0));
        }
    }
}

#[test]
fn two_sequences_in_one_pass() {
    for case in cases() {
        let mut engine = open(&case.dir, &plain_options());
        let other: Vec<u32> = case.ids.iter().rev().copied().collect();
        let alone = [&case.ids, &other].map(|ids| fed(&mut engine, ids, &[ids.len()]));
        for seed in 0..3 {
            let mut random = Random(seed);
            let mut sequences = [engine.new_sequence(), engine.new_sequence()];
            let mut together = [vec![], vec![]];
            loop {
                // Whichever is behind may also sit a pass out; the order in the pass changes too.
                let mut parts = vec![];
                for (which, (sequence, ids)) in sequences.iter_mut().zip([&case.ids, &other]).enumerate() {
                    let rest = &ids[sequence.ids().len()..];
                    let ids = &rest[..rest.len().min(random.below(34))];
                    if !ids.is_empty() {
                        parts.push((which, PassRows { sequence, ids }));
                    }
                }
                if random.below(2) == 0 {
                    parts.reverse();
                }
                let (whose, mut parts): (Vec<usize>, Vec<PassRows>) = parts.into_iter().unzip();
                let owners: Vec<usize> = whose
                    .iter()
                    .zip(&parts)
                    .flat_map(|(which, part)| vec![*which; part.ids.len()])
                    .collect();
                if !parts.is_empty() {
                    let all: Vec<usize> = (0..owners.len()).collect();
                    let logits = engine.pass(&mut parts, &all, &Cancel::default(), None).unwrap();
                    let vocab = engine.config().vocab_size;
                    for (owner, row) in owners.iter().zip(logits.chunks_exact(vocab)) {
                        together[*owner].extend(bits(row.to_vec()));
                    }
                }
                if sequences.iter().all(|s| s.ids().len() == case.ids.len()) {
                    break;
                }
            }
            for (got, want) in together.iter().zip(&alone) {
                assert_same(got, want, &format!("{:?}, batch {seed}", case.dir));
            }
        }
    }
}

#[test]
fn only_the_logits_asked_for_and_in_that_order() {
    let case = golden("k3_b");
    let mut engine = open(&case.dir, &plain_options());
    let vocab = engine.config().vocab_size;
    let want = fed(&mut engine, &case.ids, &[case.ids.len()]);
    let asked = [case.ids.len() - 1, 0, ATTENTION_BLOCK];
    let mut sequence = engine.new_sequence();
    let parts = &mut [PassRows {
        sequence: &mut sequence,
        ids: &case.ids,
    }];
    let got = bits(engine.pass(parts, &asked, &Cancel::default(), None).unwrap());
    for (row, got) in asked.iter().zip(got.chunks_exact(vocab)) {
        assert_same(got, &want[row * vocab..][..vocab], "a row asked for");
    }
    assert_eq!(got.len(), asked.len() * vocab);
}

/// A prompt is cut into the passes that were planned.
#[test]
fn prefill_in_planned_passes() {
    let case = golden("k3_a");
    let want = want(&case);
    for pass_rows in [1, 7, 100, 512] {
        let options = Options {
            pass_rows,
            ..plain_options()
        };
        let mut engine = open(&case.dir, &options);
        assert_eq!(engine.plan().pass_rows, pass_rows);
        let mut sequence = engine.new_sequence();
        let mut heard = vec![];
        let mut share = 0.0;
        let mut listen = |told: PromptProgress| {
            assert!(told.share > share, "{told:?} after {share}");
            share = told.share;
            if heard.last() != Some(&(told.done, told.of)) {
                heard.push((told.done, told.of));
            }
        };
        let got = engine
            .prefill(&mut sequence, &case.ids, &Cancel::default(), &mut listen)
            .unwrap();
        let of = case.ids.len();
        let told: Vec<(usize, usize)> = (0..=of.div_ceil(pass_rows))
            .map(|n| (of.min(n * pass_rows), of))
            .collect();
        assert_eq!(heard, told);
        assert!((share - 1.0).abs() < 1e-9, "{share}");
        assert_same(&bits(got.clone()), &want[want.len() - got.len()..], "prefill");
    }
}
