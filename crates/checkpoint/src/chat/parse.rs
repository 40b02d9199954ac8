//! The model's answer, from ids as they are generated.

use super::{Effort, MESSAGE, RESPONSE, THINK};
use crate::tokenizer::{SpecialTokens, StreamDecoder, Tokenizer};

/// A tag that grows longer than this many ids is no tag.
const MAX_TAG_IDS: usize = 256;
/// An answer that is cut off may end inside a tag of its structure, which is no longer than this; more is text.
const UNFINISHED_TAG_IDS: usize = 16;

/// Something that the model said.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ResponseEvent {
    /// More of its thoughts; never empty, whole characters.
    Reasoning(String),
    /// More of its answer; never empty, whole characters.
    Response(String),
    /// The message is complete. What comes after it is not read.
    End,
}

/// Takes generated ids one by one and separates reasoning from response.
///
/// A well-formed answer closes the think element, opens and closes the response element, closes the message and stops:
///
/// ```text
/// reasoning <|close|>think<|sep|> <|open|>response<|sep|> text <|close|>response<|sep|> <|close|>message<|sep|> <|end_of_msg|>
/// ```
///
/// Nothing is lost of one that is not. Text outside both elements belongs to the response; an element that opens inside
/// another ends it; a tag that is unknown or goes on for long, and a stray `<|sep|>`, are text and stay where they are.
/// Other special tokens have no text.
#[derive(Debug, Clone)]
pub struct ResponseParser {
    channel: Channel,
    text: StreamDecoder,
    /// The ids of a tag that is under way, its bracket first.
    tag: Vec<u32>,
    ended: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Channel {
    Reasoning,
    Response,
}

impl ResponseParser {
    /// A parser for what follows a prompt that [`render`](super::render) made with the same effort.
    pub fn new(effort: Effort) -> ResponseParser {
        ResponseParser {
            channel: if effort.thinks() {
                Channel::Reasoning
            } else {
                Channel::Response
            },
            text: StreamDecoder::new(SpecialTokens::Skip),
            tag: Vec::new(),
            ended: false,
        }
    }

    /// Takes the next id; returns what is certain now, often nothing.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> Vec<ResponseEvent> {
        let mut events = Vec::new();
        if self.ended {
            return events;
        }
        let control = tokenizer.control();
        if id == control.end_of_msg || Some(id) == control.eos {
            self.end(tokenizer, &mut events);
        } else if id == control.open || id == control.close {
            self.give_up_tag(tokenizer, &mut events);
            self.tag.push(id);
        } else if self.tag.is_empty() {
            self.say(tokenizer, id, &mut events);
        } else {
            self.tag.push(id);
            if id == control.sep {
                self.apply_tag(tokenizer, &mut events);
            } else if self.tag.len() > MAX_TAG_IDS {
                self.give_up_tag(tokenizer, &mut events);
            }
        }
        events
    }

    /// Ends an answer that was cut off: returns what was held back. A tag that was just being written is left out.
    pub fn finish(&mut self, tokenizer: &Tokenizer) -> Vec<ResponseEvent> {
        let mut events = Vec::new();
        if !self.ended {
            let opens_a_tag =
                self.tag.len() <= UNFINISHED_TAG_IDS && self.tag.iter().all(|&id| id != tokenizer.control().sep);
            if opens_a_tag {
                self.tag.clear();
            }
            self.give_up_tag(tokenizer, &mut events);
            self.flush(&mut events);
        }
        events
    }

    /// Whether the message is complete.
    pub fn ended(&self) -> bool {
        self.ended
    }

    /// The tag in `self.tag` is whole: bracket, name and attributes, `<|sep|>`.
    fn apply_tag(&mut self, tokenizer: &Tokenizer, events: &mut Vec<ResponseEvent>) {
        let opens = self.tag[0] == tokenizer.control().open;
        let inner = &self.tag[1..self.tag.len() - 1];
        let inner = tokenizer.decode(inner, SpecialTokens::Keep);
        let name = inner.split(' ').next().unwrap_or_default();
        match (opens, name) {
            (true, THINK) => self.enter(Channel::Reasoning, events),
            (true, RESPONSE) | (false, THINK | RESPONSE) => self.enter(Channel::Response, events),
            (false, MESSAGE) => {
                self.tag.clear();
                self.end(tokenizer, events);
            }
            _ => self.give_up_tag(tokenizer, events),
        }
    }

    fn enter(&mut self, channel: Channel, events: &mut Vec<ResponseEvent>) {
        self.tag.clear();
        self.flush(events);
        self.channel = channel;
    }

    fn end(&mut self, tokenizer: &Tokenizer, events: &mut Vec<ResponseEvent>) {
        self.give_up_tag(tokenizer, events);
        self.flush(events);
        self.ended = true;
        events.push(ResponseEvent::End);
    }

    /// What looked like a tag is text after all.
    fn give_up_tag(&mut self, tokenizer: &Tokenizer, events: &mut Vec<ResponseEvent>) {
        for id in std::mem::take(&mut self.tag) {
            self.say(tokenizer, id, events);
        }
    }

    fn say(&mut self, tokenizer: &Tokenizer, id: u32, events: &mut Vec<ResponseEvent>) {
        let text = self.text.push(tokenizer, id);
        self.emit(text, events);
    }

    /// Half a character at the end of a channel will not become whole.
    fn flush(&mut self, events: &mut Vec<ResponseEvent>) {
        let text = self.text.finish();
        self.emit(text, events);
    }

    fn emit(&self, text: String, events: &mut Vec<ResponseEvent>) {
        if text.is_empty() {
            return;
        }
        match (self.channel, events.last_mut()) {
            (Channel::Reasoning, Some(ResponseEvent::Reasoning(said)))
            | (Channel::Response, Some(ResponseEvent::Response(said))) => said.push_str(&text),
            (Channel::Reasoning, _) => events.push(ResponseEvent::Reasoning(text)),
            (Channel::Response, _) => events.push(ResponseEvent::Response(text)),
        }
    }
}
