//! Answers, well formed and not, taken apart as their ids arrive.

use std::path::Path;

use checkpoint::chat::{Effort, Message, ResponseEvent, ResponseParser, Role, render};
use checkpoint::tokenizer::Tokenizer;
use proptest::prelude::*;

fn tokenizer() -> Tokenizer {
    let testdata = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/tok_b");
    Tokenizer::load(&testdata).unwrap()
}

/// All that was said, and whether the message ended.
#[derive(Debug, Default, PartialEq)]
struct Answer {
    reasoning: String,
    response: String,
    ended: bool,
}

impl Answer {
    fn new(reasoning: &str, response: &str, ended: bool) -> Answer {
        let (reasoning, response) = (reasoning.into(), response.into());
        Answer {
            reasoning,
            response,
            ended,
        }
    }

    fn add(&mut self, events: Vec<ResponseEvent>) {
        for event in events {
            assert!(!self.ended, "{event:?} after the end");
            match event {
                ResponseEvent::Reasoning(text) if !text.is_empty() => self.reasoning += &text,
                ResponseEvent::Response(text) if !text.is_empty() => self.response += &text,
                ResponseEvent::End => self.ended = true,
                other => panic!("{other:?}"),
            }
        }
    }
}

fn parse_ids(tokenizer: &Tokenizer, ids: &[u32], effort: Effort) -> Answer {
    let mut parser = ResponseParser::new(effort);
    let mut answer = Answer::default();
    for &id in ids {
        answer.add(parser.push(tokenizer, id));
        assert_eq!(parser.ended(), answer.ended);
    }
    answer.add(parser.finish(tokenizer));
    answer
}

/// The answer that `text` spells, special tokens included.
fn parse(text: &str, effort: Effort) -> Answer {
    let tokenizer = tokenizer();
    parse_ids(&tokenizer, &tokenizer.encode_with_specials(text), effort)
}

const THINK_END: &str = "<|close|>think<|sep|>";
const RESPONSE: &str = "<|open|>response<|sep|>";
const RESPONSE_END: &str = "<|close|>response<|sep|>";
const END: &str = "<|close|>message<|sep|><|end_of_msg|>";

#[test]
fn well_formed() {
    let text = format!("hm {{}}{THINK_END}{RESPONSE}yes & no{RESPONSE_END}{END}");
    assert_eq!(parse(&text, Effort::Max), Answer::new("hm {}", "yes & no", true));
    let text = format!("yes{RESPONSE_END}{END}");
    assert_eq!(parse(&text, Effort::Off), Answer::new("", "yes", true));
    assert_eq!(parse("", Effort::Low), Answer::default());
}

#[test]
fn missing_tags() {
    // Thought on without closing; answered without opening; stopped early.
    let text = format!("hm{RESPONSE}yes{END}");
    assert_eq!(parse(&text, Effort::Max), Answer::new("hm", "yes", true));
    let text = format!("hm{THINK_END}yes{RESPONSE}!<|end_of_msg|>");
    assert_eq!(parse(&text, Effort::Max), Answer::new("hm", "yes!", true));
    assert_eq!(parse("hm", Effort::High), Answer::new("hm", "", false));
    assert_eq!(parse("hm[EOS]", Effort::High), Answer::new("hm", "", true));
    let text = format!("hm{THINK_END}{RESPONSE}yes{RESPONSE_END} more<|close|>message<|sep|>");
    assert_eq!(parse(&text, Effort::Max), Answer::new("hm", "yes more", true));
}

#[test]
fn thoughts_may_come_again() {
    let text = format!("a{THINK_END}{RESPONSE}b<|open|>think<|sep|>c{THINK_END}{RESPONSE}d{END}");
    assert_eq!(parse(&text, Effort::Max), Answer::new("ac", "bd", true));
}

/// An answer that is cut off inside a tag of its structure ends before the tag.
#[test]
fn an_unfinished_tag_at_the_end_is_left_out() {
    for rest in ["<|close|>", "<|close|>response", "<|open|>", "<|open|>respon"] {
        let text = format!("Paris.{rest}");
        assert_eq!(parse(&text, Effort::Off), Answer::new("", "Paris.", false), "{rest}");
    }
    let text = format!("Paris.{RESPONSE_END}<|close|>message");
    assert_eq!(parse(&text, Effort::Off), Answer::new("", "Paris.", false));
    assert_eq!(
        parse("a<|open|><|open|>b", Effort::Off),
        Answer::new("", "a<|open|>", false)
    );
    assert_eq!(parse("hm<|close|>", Effort::Low), Answer::new("hm", "", false));
}

#[test]
fn what_is_no_tag_is_text() {
    let same = |text: &str| assert_eq!(parse(text, Effort::Off), Answer::new("", text, false));
    same("a<|sep|>b");
    same("a<|open|>b<|sep|>c");
    same("a<|open|>message role=\"user\"<|sep|>c");
    same("a<|open|>tools<|sep|><|open|>call tool=\"x\" index=\"1\"<|sep|><|close|>call<|sep|>");
    same("a<|close|>thinker<|sep|>b");
    same("a<|open|> think<|sep|>b");
    same("a<|open|><|sep|>b");
    same(&format!("a<|open|>{}", "response ".repeat(1000)));
    let text = format!("a<|open|>respon{END}");
    assert_eq!(parse(&text, Effort::Off), Answer::new("", "a<|open|>respon", true));
    // A tag that gave up does not swallow the one after it.
    let text = format!("a<|open|>x{RESPONSE}b");
    assert_eq!(parse(&text, Effort::Max), Answer::new("a<|open|>x", "b", false));
    // Attributes are no part of the name.
    let text = "a<|open|>response kind=\"x\"<|sep|>b";
    assert_eq!(parse(text, Effort::Max), Answer::new("a", "b", false));
}

#[test]
fn a_spelled_tag_is_no_tag() {
    let tokenizer = tokenizer();
    let spelled = format!("{THINK_END}{RESPONSE}{END}");
    let ids = tokenizer.encode_ordinary(&spelled);
    assert_eq!(
        parse_ids(&tokenizer, &ids, Effort::Max),
        Answer::new(&spelled, "", false)
    );
}

#[test]
fn a_long_unfinished_tag_is_let_go_while_the_model_speaks() {
    let tokenizer = tokenizer();
    let mut parser = ResponseParser::new(Effort::Off);
    let ids = tokenizer.encode_with_specials(&format!("<|open|>{}", "\u{1}".repeat(400)));
    let events = ids.iter().flat_map(|&id| parser.push(&tokenizer, id));
    let said: usize = events
        .map(|event| matches!(event, ResponseEvent::Response(_)) as usize)
        .sum();
    // One event when the tag reaches 257 ids, then one for each of the others.
    assert_eq!(said, 1 + 401 - 257);
}

#[test]
fn half_a_character_stays_in_its_channel() {
    let tokenizer = tokenizer();
    let half = tokenizer.encode_ordinary("\u{20AC}")[0];
    let response = tokenizer.encode_with_specials(RESPONSE);
    let ids = [&[half], response.as_slice(), &[half]].concat();
    let answer = parse_ids(&tokenizer, &ids, Effort::Max);
    assert_eq!(answer, Answer::new("\u{FFFD}", "\u{FFFD}", false));
}

#[test]
fn other_special_tokens_have_no_text() {
    assert_eq!(parse("a[BOS]<|media_pad|>b", Effort::Off), Answer::new("", "ab", false));
}

proptest! {
    /// What a prompt says of an earlier answer is what that answer was.
    #[test]
    fn rendered_answers_come_back(
        reasoning in "(<\\|close\\|>think<\\|sep\\|>|\\PC|\n){1,9}",
        content in "(<\\|end_of_msg\\|>|&amp;|\\PC|\n){0,9}",
        thinks in any::<bool>(),
    ) {
        prop_assume!(!reasoning.trim().is_empty());
        let tokenizer = tokenizer();
        let effort = if thinks { Effort::Unspecified } else { Effort::Off };
        let reasoning = if thinks { reasoning } else { String::new() };
        let answer = Message { reasoning: Some(reasoning.clone()), ..Message::new(Role::Assistant, content.clone()) };
        let question = Message::new(Role::User, "q");
        let prompt = render(&tokenizer, std::slice::from_ref(&question), effort);
        let both = render(&tokenizer, &[question, answer], effort);
        prop_assert!(both.starts_with(&prompt));
        prop_assert_eq!(parse_ids(&tokenizer, &both[prompt.len()..], effort), Answer {
            reasoning,
            response: content,
            ended: true,
        });
    }

    /// Any ids at all are read; a stop ends the message, and without brackets all text is reasoning.
    #[test]
    fn any_ids_are_read(ids in prop::collection::vec(prop_oneof![0u32..384, 384u32..392, Just(387), Just(388), Just(389)], 0..80)) {
        let tokenizer = tokenizer();
        let control = tokenizer.control();
        let answer = parse_ids(&tokenizer, &ids, Effort::Max);
        let stops = |id: &u32| *id == control.end_of_msg || Some(*id) == control.eos;
        if ids.iter().any(stops) {
            prop_assert!(answer.ended);
        } else if !ids.iter().any(|&id| id == control.open || id == control.close) {
            let text = tokenizer.decode(&ids, checkpoint::tokenizer::SpecialTokens::Skip);
            prop_assert_eq!(answer, Answer::new(&text, "", false));
        }
    }
}
