//! The demo model knows what it was trained on, and computes what its training code computed.

mod common;

use checkpoint::Checkpoint;
use checkpoint::chat::{Effort, Message, Role, render};
use checkpoint::tokenizer::Tokenizer;
use common::{largest_difference, open, plain_options, read_npy};
use engine::{Cancel, Engine, Finish, Options, PassRows, Sequence, Transcript, greedy};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// No answer needs as many tokens.
const MAX_TOKENS: usize = 160;
/// Questions answered at one time, and rows of a pass.
const SEQUENCES: usize = 128;
const PASS_ROWS: usize = 512;
/// The bound for an f32 engine against a float64 reference.
const LOGIT_TOLERANCE: f32 = 2e-3;
/// Between the engine's loss and that of the training code, relative.
const LOSS_TOLERANCE: f64 = 1e-3;

fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../demo")
}

fn read<T: for<'de> Deserialize<'de>>(name: &str) -> T {
    serde_json::from_str(&std::fs::read_to_string(demo().join(name)).unwrap()).unwrap()
}

fn options() -> Options {
    Options {
        sequences: SEQUENCES,
        pass_rows: PASS_ROWS,
        ..plain_options()
    }
}

/// A line of `eval.jsonl`.
#[derive(Deserialize)]
struct Question {
    kind: String,
    effort: String,
    messages: Vec<Said>,
    expected: String,
    r#match: String,
}

#[derive(Deserialize)]
struct Said {
    role: String,
    content: String,
}

impl Question {
    fn effort(&self) -> Effort {
        match self.effort.as_str() {
            "off" => Effort::Off,
            "low" => Effort::Low,
            other => panic!("effort {other}"),
        }
    }

    fn prompt(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        let message = |said: &Said| {
            assert_eq!(said.role, "user");
            Message::new(Role::User, said.content.clone())
        };
        let messages: Vec<Message> = self.messages.iter().map(message).collect();
        render(tokenizer, &messages, self.effort())
    }

    /// An answer that does not end by itself is wrong.
    fn is_right(&self, answer: &Answer, tokenizer: &Tokenizer) -> bool {
        let mut transcript = Transcript::chat(self.effort(), vec![]);
        for &id in &answer.ids {
            transcript.push(tokenizer, id);
        }
        transcript.finish(tokenizer);
        let text = transcript.text.trim();
        answer.finish == Finish::Stop
            && match self.r#match.as_str() {
                "exact" => text == self.expected,
                "prefix" => text.starts_with(&self.expected),
                other => panic!("match {other}"),
            }
    }
}

struct Answer {
    ids: Vec<u32>,
    finish: Finish,
}

/// An answer under way.
struct Live {
    question: usize,
    sequence: Sequence,
    /// Ids that the sequence has not seen: the rest of the prompt, or the last new token.
    waiting: Vec<u32>,
    ids: Vec<u32>,
}

/// Greedy answers to all prompts, many in a pass: when one ends the next prompt takes its place.
fn answers(engine: &mut Engine, prompts: &[Vec<u32>]) -> Vec<Answer> {
    let stop_ids = engine.checkpoint().stop_ids().to_vec();
    let vocab = engine.config().vocab_size;
    let mut answers: Vec<Option<Answer>> = prompts.iter().map(|_| None).collect();
    let mut to_come = prompts.iter().enumerate();
    let mut live: Vec<Live> = vec![];
    loop {
        while live.len() < SEQUENCES
            && let Some((question, prompt)) = to_come.next()
        {
            live.push(Live {
                question,
                sequence: engine.new_sequence(),
                waiting: prompt.clone(),
                ids: vec![],
            });
        }
        if live.is_empty() {
            return answers.into_iter().flatten().collect();
        }
        let (mut parts, mut taken, mut ends, mut rows) = (vec![], vec![], vec![], 0);
        for one in &mut live {
            let part = one.waiting.len().min(PASS_ROWS - rows);
            taken.push(part);
            if part > 0 {
                rows += part;
                ends.push(rows - 1);
                parts.push(PassRows {
                    sequence: &mut one.sequence,
                    ids: &one.waiting[..part],
                });
            }
        }
        let logits = engine.pass(&mut parts, &ends, &Cancel::default(), None).unwrap();
        let mut logits = logits.chunks_exact(vocab);
        for (one, part) in live.iter_mut().zip(taken) {
            one.waiting.drain(..part);
            let row = if part > 0 { logits.next() } else { None };
            let Some(row) = row.filter(|_| one.waiting.is_empty()) else {
                continue;
            };
            let id = greedy(row);
            one.ids.push(id);
            one.waiting.push(id);
            let finish = match stop_ids.contains(&id) {
                true => Some(Finish::Stop),
                false if one.ids.len() == MAX_TOKENS => Some(Finish::Length),
                false => None,
            };
            answers[one.question] = finish.map(|finish| Answer {
                ids: std::mem::take(&mut one.ids),
                finish,
            });
        }
        live.retain(|one| answers[one.question].is_none());
    }
}

#[test]
fn it_answers_and_stops() {
    let lines = std::fs::read_to_string(demo().join("eval.jsonl")).unwrap();
    let questions: Vec<Question> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let tokenizer = Tokenizer::load(&demo().join("model")).unwrap();
    let mut engine = open(&demo().join("model"), &options());
    let prompts: Vec<Vec<u32>> = questions.iter().map(|q| q.prompt(&tokenizer)).collect();
    let answers = answers(&mut engine, &prompts);
    let stats = engine.stats();
    assert_eq!(
        stats.expert_bytes_read + stats.expert_bytes_cached,
        stats.expert_bytes_needed
    );
    // By kind, and for ledgers by verdict: right answers and questions.
    let mut counts: BTreeMap<(&str, &str), (f64, f64)> = BTreeMap::new();
    for (question, answer) in questions.iter().zip(&answers) {
        let verdict = match question.kind.as_str() {
            "ledger" => question.expected.as_str(),
            _ => "",
        };
        let (right, asked) = counts.entry((&question.kind, verdict)).or_default();
        *right += f64::from(question.is_right(answer, &tokenizer));
        *asked += 1.0;
    }
    println!("{counts:?}");
    let share = |kind, verdict| {
        let (right, asked) = counts[&(kind, verdict)];
        assert!(asked >= 20.0, "{kind} {verdict}: {asked} questions");
        right / asked
    };
    assert!(share("capital", "") >= 0.95, "{counts:?}");
    assert!(share("sum", "") >= 0.9, "{counts:?}");
    assert!(share("month", "") >= 0.9, "{counts:?}");
    assert!(
        (share("ledger", "Yes") + share("ledger", "No")) / 2.0 >= 0.9,
        "{counts:?}"
    );
    assert_eq!(counts.len(), 5);
}

/// Logits after each of `ids`, from an empty state.
fn all_logits(engine: &mut Engine, ids: &[u32]) -> Vec<f32> {
    let all: Vec<usize> = (0..ids.len()).collect();
    let parts = &mut [PassRows {
        sequence: &mut engine.new_sequence(),
        ids,
    }];
    engine.pass(parts, &all, &Cancel::default(), None).unwrap()
}

/// Nats, in float64.
fn negative_log_likelihood(logits: &[f32], id: u32) -> f64 {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max) as f64;
    let sum: f64 = logits.iter().map(|&l| (l as f64 - largest).exp()).sum();
    largest + sum.ln() - logits[id as usize] as f64
}

#[test]
fn its_held_out_loss_is_that_of_the_training_code() {
    #[derive(Deserialize)]
    struct HeldOut {
        loss: f64,
        ids: Vec<Vec<u32>>,
    }
    let held: HeldOut = read("heldout.json");
    let mut engine = open(&demo().join("model"), &options());
    let vocab = engine.config().vocab_size;
    let (mut sum, mut tokens) = (0.0, 0.0);
    for ids in &held.ids {
        let logits = all_logits(&mut engine, ids);
        for (row, &id) in logits.chunks_exact(vocab).zip(&ids[1..]) {
            sum += negative_log_likelihood(row, id);
            tokens += 1.0;
        }
    }
    let loss: f64 = sum / tokens;
    let off = (loss / held.loss - 1.0).abs();
    println!(
        "held-out loss {loss} over {tokens} tokens, training code {}: {off:e} apart",
        held.loss
    );
    assert!(off < LOSS_TOLERANCE, "loss {loss} for {}", held.loss);
}

#[test]
fn its_logits_are_those_of_the_reference() {
    #[derive(Deserialize)]
    struct Prompt {
        ids: Vec<u32>,
    }
    let prompt: Prompt = read("reference_logits.json");
    let want = read_npy(&demo().join("reference_logits.npy"));
    let mut engine = open(&demo().join("model"), &options());
    let worst = largest_difference(&all_logits(&mut engine, &prompt.ids), &want);
    println!("largest difference of logits {worst:e}");
    assert!(worst < LOGIT_TOLERANCE, "logits differ by {worst}");
}

/// The engine's answers do not depend on how the questions were batched.
#[test]
fn a_question_alone_gets_the_same_answer() {
    let dir = demo().join("model");
    let tokenizer = Tokenizer::load(&dir).unwrap();
    assert!(
        Checkpoint::open(&dir)
            .unwrap()
            .stop_ids()
            .contains(&tokenizer.control().end_of_msg)
    );
    let prompts: Vec<Vec<u32>> = ["What is the capital of France?", "What is 17 + 25?", "Hello"]
        .map(|text| render(&tokenizer, &[Message::new(Role::User, text)], Effort::Low))
        .to_vec();
    let mut engine = open(&dir, &options());
    let together = answers(&mut engine, &prompts);
    for (prompt, together) in prompts.iter().zip(together) {
        let alone = answers(&mut engine, std::slice::from_ref(prompt)).remove(0);
        assert_eq!(alone.ids, together.ids);
    }
}
