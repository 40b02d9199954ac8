//! Requests that share their passes: the same tokens as alone, and no byte more than the union of their routes.

mod common;

use common::{Golden, Random, open, plain_options, tiny};
use engine::{Batch, Cancel, Engine, Error, Fairness, Finish, Options, PassRows, Request, Routes, Sampling, greedy};
use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::path::PathBuf;

/// Requests of all kinds: short and long prompts, greedy and sampled, with and without ids that end them.
fn requests(count: usize) -> Vec<Request> {
    let mut random = Random(5);
    (0..count)
        .map(|which| Request {
            prompt: (0..1 + random.below(if which % 3 == 0 { 90 } else { 9 }))
                .map(|_| random.below(500) as u32)
                .collect(),
            max_tokens: 1 + random.below(14),
            stop_ids: (0..which as u32 % 4 * 100).map(|id| 3 * id).collect(),
            sampling: match which % 2 {
                0 => Sampling::default(),
                _ => Sampling {
                    temperature: 1.0,
                    top_p: 0.95,
                    seed: which as u64,
                    ..Sampling::default()
                },
            },
        })
        .collect()
}

type Made = (Vec<u32>, Finish);

fn alone(engine: &mut Engine, request: &Request) -> Made {
    let mut sequence = engine.new_sequence();
    let cancel = Cancel::default();
    let made = engine
        .generate(&mut sequence, request, &cancel, &mut |_| ControlFlow::Continue(()))
        .unwrap();
    (made.ids, made.finish)
}

/// Runs all requests in a batch that they join in this order, as `arrivals` says how many before each pass; what each made.
fn together(
    engine: &mut Engine,
    fairness: Fairness,
    requests: &[Request],
    order: &[usize],
    mut arrivals: impl FnMut() -> usize,
) -> Vec<Made> {
    let mut batch = Batch::new(engine, fairness);
    let mut made = vec![None; requests.len()];
    let mut order = order.iter();
    loop {
        for &which in order.by_ref().take(arrivals()) {
            batch.join(engine, requests[which].clone(), (which, vec![])).unwrap();
        }
        if batch.is_empty() && order.len() == 0 {
            break;
        }
        let ended = batch
            .step(engine, &Cancel::default(), None, &mut |(_, heard), id| {
                heard.push(id);
                ControlFlow::Continue(())
            })
            .unwrap();
        assert!(batch.running() <= batch.limit());
        for ended in ended {
            let (which, heard) = ended.tag;
            assert_eq!(heard, ended.generated.ids);
            assert!(made[which].replace((heard, ended.generated.finish)).is_none());
        }
    }
    made.into_iter().map(Option::unwrap).collect()
}

#[test]
fn tokens_are_those_alone_whatever_the_company() {
    let own = tiny();
    let dirs: [PathBuf; 3] = [
        Golden::read("k3_a").dir,
        Golden::read("k3_b").dir,
        own.path().to_owned(),
    ];
    for dir in dirs {
        let requests = requests(8);
        let mut engine = open(&dir, &plain_options());
        let want: Vec<Made> = requests.iter().map(|request| alone(&mut engine, request)).collect();
        assert!(want.iter().any(|(_, finish)| *finish == Finish::Stop));
        assert!(want.iter().any(|(ids, _)| ids.len() > 5));
        let forward: Vec<usize> = (0..requests.len()).collect();
        let backward: Vec<usize> = (0..requests.len()).rev().collect();
        for (sequences, pass_rows) in [(8, 512), (5, 512), (8, 9), (1, 1)] {
            let options = Options {
                sequences,
                pass_rows,
                ..plain_options()
            };
            let mut engine = open(&dir, &options);
            assert_eq!(
                (engine.plan().sequences, engine.plan().pass_rows),
                (sequences, pass_rows)
            );
            let passes = engine.stats().passes;
            for order in [&forward, &backward] {
                let got = together(&mut engine, Fairness::FullPasses, &requests, order, || 8);
                assert_eq!(
                    got, want,
                    "{dir:?}: all at once, {sequences} sequences, {pass_rows} rows"
                );
            }
            let mut random = Random(sequences as u64);
            let one_by_one = together(&mut engine, Fairness::FullPasses, &requests, &forward, || {
                random.below(3)
            });
            assert_eq!(
                one_by_one, want,
                "{dir:?}: joined midway, {sequences} sequences, {pass_rows} rows"
            );
            let steady = Fairness::PromptRows(4);
            let steady = together(&mut engine, steady, &requests, &backward, || random.below(4));
            assert_eq!(
                steady, want,
                "{dir:?}: few prompt rows, {sequences} sequences, {pass_rows} rows"
            );
            let stats = engine.stats();
            assert!(stats.passes > passes && stats.most_rows <= pass_rows as u64);
            assert_eq!(stats.expert_bytes_read, stats.expert_bytes_needed);
        }
    }
}

#[test]
fn bytes_follow_the_union_of_the_routes() {
    let golden = Golden::read("k3_b");
    let options = Options {
        sequences: 64,
        ..plain_options()
    };
    let mut engine = open(&golden.dir, &options);
    let expert_bytes = engine
        .checkpoint()
        .expert(engine.config().num_hidden_layers - 1, 0)
        .unwrap()
        .bytes();
    let mut random = Random(1);
    let mut per_token = vec![];
    for size in [1, 2, 4, 8, 16, 32, 64] {
        let mut batch = Batch::new(&engine, Fairness::FullPasses);
        for _ in 0..size {
            let request = Request {
                prompt: (0..3).map(|_| random.below(500) as u32).collect(),
                max_tokens: 6,
                stop_ids: vec![],
                sampling: Sampling::default(),
            };
            batch.join(&engine, request, ()).unwrap();
        }
        let (start, mut unions) = (engine.stats(), 0);
        while !batch.is_empty() {
            let mut asked = BTreeSet::new();
            let mut probe = |layer: usize, _: &[f32], routes: Option<&Routes>| {
                let experts = routes.map(|routes| &routes.experts[..]).unwrap_or_default();
                asked.extend(experts.iter().map(|&expert| (layer, expert)));
            };
            let go_on = &mut |_: &mut (), _| ControlFlow::Continue(());
            batch
                .step(&mut engine, &Cancel::default(), Some(&mut probe), go_on)
                .unwrap();
            unions += asked.len() as u64;
        }
        let end = engine.stats();
        assert_eq!(end.passes - start.passes, 6);
        assert_eq!(end.rows - start.rows, size * (3 + 5));
        assert_eq!(
            end.expert_bytes_needed - start.expert_bytes_needed,
            unions * expert_bytes,
            "{size}"
        );
        assert_eq!(
            end.expert_bytes_read - start.expert_bytes_read,
            unions * expert_bytes,
            "{size}"
        );
        per_token.push(unions as f64 / (size * 6) as f64);
    }
    assert!(per_token.is_sorted_by(|a, b| a > b), "{per_token:?}");
}

/// Prompts and decoding share a pass, and its rows are what the policy says.
#[test]
fn a_prompt_joins_the_passes_of_those_that_decode() {
    let golden = Golden::read("k3_a");
    let options = Options {
        sequences: 2,
        pass_rows: 8,
        ..plain_options()
    };
    let request = |prompt: usize, max_tokens| Request {
        prompt: golden.long_prompt[..prompt].to_vec(),
        max_tokens,
        stop_ids: vec![],
        sampling: Sampling::default(),
    };
    let rows_of = |fairness, passes: usize| {
        let mut engine = open(&golden.dir, &options);
        let mut batch = Batch::new(&engine, fairness);
        batch.join(&engine, request(2, 9), ()).unwrap();
        let step = |engine: &mut Engine, batch: &mut Batch<()>| {
            let before = engine.stats().rows;
            let go_on = &mut |_: &mut (), _| ControlFlow::Continue(());
            batch.step(engine, &Cancel::default(), None, go_on).unwrap();
            engine.stats().rows - before
        };
        let mut rows = vec![step(&mut engine, &mut batch)];
        batch.join(&engine, request(20, 2), ()).unwrap();
        assert!(!batch.has_room());
        rows.extend((1..passes).map(|_| step(&mut engine, &mut batch)));
        rows
    };
    assert_eq!(rows_of(Fairness::FullPasses, 6), [2, 8, 8, 7, 2, 1]);
    assert_eq!(rows_of(Fairness::PromptRows(5), 7), [2, 6, 6, 6, 6, 2, 1]);
}

#[test]
fn what_can_never_run_is_refused_at_once() {
    let engine = open(&Golden::read("k3_a").dir, &plain_options());
    let mut batch = Batch::new(&engine, Fairness::FullPasses);
    let request = |prompt: Vec<u32>, max_tokens| Request {
        prompt,
        max_tokens,
        stop_ids: vec![],
        sampling: Sampling::default(),
    };
    let mut refused = |prompt, max_tokens| batch.join(&engine, request(prompt, max_tokens), ()).unwrap_err();
    assert!(matches!(refused(vec![], 1), Error::EmptyPrompt));
    assert!(matches!(refused(vec![1], 0), Error::NoTokens));
    assert!(matches!(refused(vec![u32::MAX], 1), Error::TokenId { .. }));
    // Of 512 positions; the last token is not fed.
    assert!(matches!(refused(vec![1; 500], 14), Error::Context { wanted: 513, .. }));
    assert!(matches!(refused(vec![1], usize::MAX), Error::Context { .. }));
    assert!(batch.is_empty());
    batch.join(&engine, request(vec![1; 500], 13), ()).unwrap();
    assert!(!batch.has_room(), "there is memory for one");
}

#[test]
fn a_listener_ends_its_own_sequence() {
    let golden = Golden::read("k3_a");
    let options = Options {
        sequences: 2,
        ..plain_options()
    };
    let mut engine = open(&golden.dir, &options);
    let mut batch = Batch::new(&engine, Fairness::FullPasses);
    for most in [3, usize::MAX] {
        let request = Request {
            prompt: golden.prompt.clone(),
            max_tokens: 8,
            stop_ids: vec![],
            sampling: Sampling::default(),
        };
        batch.join(&engine, request, (most, 0)).unwrap();
    }
    let mut ends = vec![];
    while !batch.is_empty() {
        let ended = batch.step(&mut engine, &Cancel::default(), None, &mut |(most, heard), _| {
            *heard += 1;
            if heard == most {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        });
        ends.extend(
            ended
                .unwrap()
                .into_iter()
                .map(|e| (e.generated.ids, e.generated.finish)),
        );
    }
    let want = &golden.generated[..8];
    assert_eq!(
        ends,
        [(want[..3].to_vec(), Finish::Stop), (want.to_vec(), Finish::Length)]
    );
}

/// A state that leaves can go on as any other.
#[test]
fn a_sequence_that_left_can_be_continued() {
    let golden = Golden::read("k3_a");
    let mut engine = open(&golden.dir, &plain_options());
    let mut batch = Batch::new(&engine, Fairness::FullPasses);
    let request = Request {
        prompt: golden.prompt.clone(),
        max_tokens: 4,
        stop_ids: vec![],
        sampling: Sampling::default(),
    };
    batch.join(&engine, request, ()).unwrap();
    let mut ended = vec![];
    while !batch.is_empty() {
        let go_on = &mut |_: &mut (), _| ControlFlow::Continue(());
        ended.extend(batch.step(&mut engine, &Cancel::default(), None, go_on).unwrap());
    }
    let mut sequence = ended.remove(0).sequence;
    let parts = &mut [PassRows {
        sequence: &mut sequence,
        ids: &golden.generated[3..4],
    }];
    let logits = engine.pass(parts, &[0], &Cancel::default(), None).unwrap();
    assert_eq!(greedy(&logits), golden.generated[4]);
}

#[test]
fn memory_decides_how_many_run() {
    let dir = Golden::read("k3_a").dir;
    let plan = |memory, sequences| {
        let options = Options {
            memory,
            sequences,
            pass_rows: 2048,
            ..plain_options()
        };
        open(&dir, &options).plan().clone()
    };
    let one = plan(1 << 30, 1);
    assert_eq!((one.sequences, one.pass_rows), (1, 2048));
    let mut before = 0;
    for memory in [96 << 20, 128 << 20, 256 << 20, 1 << 30] {
        let plan = plan(memory, 1000);
        assert_eq!(plan.state, plan.sequences as u64 * one.state);
        assert!(plan.total() <= memory && plan.sequences <= plan.pass_rows, "{plan}");
        assert!(plan.sequences > before, "{plan}");
        before = plan.sequences;
    }
    assert_eq!(before, 1000);
}
