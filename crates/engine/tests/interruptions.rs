//! Passes that do not take place or do not end: what they leave behind.

mod common;

use common::{Golden, assert_same, fed, open, pass, plain_options};
use engine::{Cancel, Engine, Error, Finish, Options, PassRows, Request, Sampling, Sequence};
use std::ops::ControlFlow;
use std::time::Instant;

/// The logits after each token of the long prompt, in one pass of an engine that nothing happened to.
fn want(golden: &Golden) -> Vec<u32> {
    let ids = &golden.long_prompt;
    fed(&mut open(&golden.dir, &plain_options()), ids, &[ids.len()])
}

/// Cancels from inside a pass, so that it ends in a known layer.
fn cancelled_after(engine: &mut Engine, ids: &[u32], layer: usize) -> Sequence {
    let mut sequence = engine.new_sequence();
    let cancel = Cancel::default();
    let parts = &mut [PassRows {
        sequence: &mut sequence,
        ids,
    }];
    let mut probe = |seen: usize, _: &[f32], _: Option<&engine::Routes>| {
        if seen == layer {
            cancel.cancel();
        }
    };
    let result = engine.pass(parts, &[], &cancel, Some(&mut probe));
    assert!(matches!(result, Err(Error::Cancelled)), "{result:?}");
    sequence
}

#[test]
fn a_cancelled_pass_spoils_its_sequence_and_nothing_else() {
    let golden = Golden::read("k3_a");
    let ids = &golden.long_prompt[..];
    let want = want(&golden);
    let mut engine = open(&golden.dir, &plain_options());
    for layer in [0, 3, 7] {
        let mut kept = engine.new_sequence();
        let before = pass(&mut engine, &mut kept, &ids[..20]);
        let spoilt = cancelled_after(&mut engine, ids, layer);
        assert!(spoilt.is_spoilt());
        assert!(spoilt.ids().is_empty(), "tokens of a failed pass do not count");
        assert!(!kept.is_spoilt());
        let after = pass(&mut engine, &mut kept, &ids[20..]);
        assert_same(
            &[before, after].concat(),
            &want,
            "a sequence that lived through a cancellation",
        );
    }
}

/// Cancelled from elsewhere at any time, experts in flight included: the next pass is as good as the first.
#[test]
fn a_cancellation_at_any_time() {
    const TRIALS: u32 = 20;
    let golden = Golden::read("k3_a");
    let ids = &golden.long_prompt[..];
    let want = want(&golden);
    let options = Options {
        slots: Some(2),
        ..plain_options()
    };
    let mut engine = open(&golden.dir, &options);
    let start = Instant::now();
    fed(&mut engine, ids, &[ids.len()]);
    let whole = start.elapsed();
    let mut cancelled = 0;
    for trial in 0..TRIALS {
        let cancel = Cancel::default();
        let mut sequence = engine.new_sequence();
        let parts = &mut [PassRows {
            sequence: &mut sequence,
            ids,
        }];
        let result = std::thread::scope(|scope| {
            let canceller = scope.spawn(|| {
                std::thread::sleep(whole * trial / TRIALS);
                cancel.cancel();
            });
            let result = engine.pass(parts, &[], &cancel, None);
            // The thread sanitizer sees a join, but not the end of a scope.
            canceller.join().unwrap();
            result
        });
        match result {
            Ok(_) => assert_eq!((sequence.is_spoilt(), sequence.ids()), (false, ids)),
            Err(Error::Cancelled) => {
                assert!(sequence.ids().is_empty());
                cancelled += 1;
            }
            Err(e) => panic!("{e}"),
        }
    }
    println!("{cancelled} of {TRIALS} passes cancelled");
    assert!(cancelled > 0);
    let got = fed(&mut engine, ids, &[ids.len()]);
    assert_same(&got, &want, "after cancellations");
}

#[test]
fn a_cancelled_generation_says_so() {
    let golden = Golden::read("k3_a");
    let ids = &golden.long_prompt[..];
    let mut engine = open(&golden.dir, &plain_options());
    let request = Request {
        prompt: ids[..5].to_vec(),
        max_tokens: 10,
        stop_ids: vec![],
        sampling: Sampling::default(),
    };
    let whole = engine
        .generate(&mut engine.new_sequence(), &request, &Cancel::default(), &mut |_| {
            ControlFlow::Continue(())
        })
        .unwrap();
    assert_eq!((whole.ids.len(), whole.finish), (10, Finish::Length));
    let cancel = Cancel::default();
    let mut tokens = 0;
    let made = engine
        .generate(&mut engine.new_sequence(), &request, &cancel, &mut |progress| {
            tokens += usize::from(matches!(progress, engine::Progress::Token(_)));
            if tokens == 3 {
                cancel.cancel();
            }
            ControlFlow::Continue(())
        })
        .unwrap();
    assert_eq!((&made.ids[..], made.finish), (&whole.ids[..3], Finish::Cancelled));
    // Cancelled between two passes: nothing is lost, and the sequence goes on where it stood.
    let mut sequence = engine.new_sequence();
    let made = engine
        .generate(&mut sequence, &request, &cancel, &mut |_| ControlFlow::Continue(()))
        .unwrap();
    assert_eq!((made.ids.len(), made.finish), (0, Finish::Cancelled));
    assert_eq!((sequence.is_spoilt(), sequence.ids().len()), (false, 0));
    cancel.reset();
    let made = engine
        .generate(&mut sequence, &request, &cancel, &mut |_| ControlFlow::Continue(()))
        .unwrap();
    assert_eq!(made.ids, whole.ids);
}

#[test]
fn refused_tokens_leave_sequences_and_engine_as_they_were() {
    let golden = Golden::read("k3_a");
    let ids = &golden.long_prompt[..];
    let want = want(&golden);
    let positions = 30;
    let options = Options {
        positions,
        ..plain_options()
    };
    let mut engine = open(&golden.dir, &options);
    let vocab = engine.config().vocab_size;
    let last = vocab as u32 - 1;
    let mut first = engine.new_sequence();
    let mut second = engine.new_sequence();
    let start = pass(&mut engine, &mut first, &ids[..10]);
    let read = engine.stats();
    let too_many = ids[10..=positions].to_vec();
    for (bad, message) in [
        (
            too_many,
            "a sequence of 31 tokens does not fit the 30 positions that memory was set aside for; raise --context, or ask for fewer tokens"
                .to_owned(),
        ),
        (
            vec![7, last + 1],
            format!("token id {} is outside the vocabulary, expected 0 to {last}; check the ids", last + 1),
        ),
        (
            vec![],
            "the prompt is empty: found 0 tokens, expected at least 1; give some text or ids".to_owned(),
        ),
    ] {
        // The refused part comes last, so that the other one would have been taken already.
        let parts = &mut [
            PassRows {
                sequence: &mut second,
                ids: &ids[..3],
            },
            PassRows {
                sequence: &mut first,
                ids: &bad,
            },
        ];
        let error = engine.pass(parts, &[0], &Cancel::default(), None).unwrap_err();
        assert_eq!(error.to_string(), message);
        assert_eq!((first.is_spoilt(), second.is_spoilt()), (false, false));
        assert_eq!((first.ids(), second.ids()), (&ids[..10], &[][..]));
    }
    assert_eq!(engine.stats(), read, "nothing was read for them");
    let request = Request {
        prompt: ids[10..20].to_vec(),
        max_tokens: 12, // the last of them is never fed: 10 + 10 + 11
        stop_ids: vec![],
        sampling: Sampling::default(),
    };
    let error = engine
        .generate(&mut first, &request, &Cancel::default(), &mut |_| {
            ControlFlow::Continue(())
        })
        .unwrap_err();
    assert!(
        matches!(
            error,
            Error::Context {
                wanted: 31,
                positions: 30
            }
        ),
        "{error}"
    );
    // The last position can be used, and a new sequence starts as if nothing had been.
    let end = pass(&mut engine, &mut first, &ids[10..positions]);
    assert_same(
        &[start, end].concat(),
        &want[..positions * vocab],
        "a sequence after refusals",
    );
    let got = fed(&mut engine, &ids[..positions], &[positions]);
    assert_same(&got, &want[..positions * vocab], "a new sequence after refusals");
}

#[test]
fn a_context_beyond_the_models_own_is_refused() {
    let checkpoint = checkpoint::Checkpoint::open(&Golden::read("k3_a").dir).unwrap();
    let limit = checkpoint.config().max_position_embeddings;
    let options = Options {
        positions: limit + 1,
        ..plain_options()
    };
    let error = Engine::open(checkpoint, &options, &mut |_| ()).err().unwrap();
    assert!(
        matches!(error, Error::ContextLimit { wanted, limit: l } if wanted == limit + 1 && l == limit),
        "{error}"
    );
}

#[test]
fn a_cancelled_loading_ends_before_the_next_tensor() {
    let options = plain_options();
    let mut reports = 0;
    let checkpoint = checkpoint::Checkpoint::open(&Golden::read("k3_a").dir).unwrap();
    let cancel = options.cancel.clone();
    let opened = Engine::open(checkpoint, &options, &mut |_| {
        reports += 1;
        if reports == 3 {
            cancel.cancel();
        }
    });
    assert!(matches!(opened.err(), Some(Error::Cancelled)));
    assert_eq!(reports, 3);
}
