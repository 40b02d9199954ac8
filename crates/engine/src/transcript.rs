//! Text from generated ids: whole characters, channels told apart, stop strings held back.

use checkpoint::chat::{Effort, ResponseEvent, ResponseParser};
use checkpoint::tokenizer::{SpecialTokens, StreamDecoder, Tokenizer};

/// A piece of what the model said; never empty, whole characters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// Thoughts.
    Reasoning(String),
    /// The answer, or raw text.
    Text(String),
}

/// Turns ids into text as they come.
pub struct Transcript {
    source: Source,
    stops: StopStrings,
    /// All of the answer so far.
    pub text: String,
    /// All of the thoughts so far.
    pub reasoning: String,
}

enum Source {
    Raw(StreamDecoder),
    Chat(Box<ResponseParser>),
}

impl Transcript {
    /// Reads the continuation of plain text.
    pub fn raw(stops: Vec<String>) -> Self {
        Self::new(Source::Raw(StreamDecoder::new(SpecialTokens::Skip)), stops)
    }

    /// Reads an answer to a chat prompt that was rendered with `effort`.
    pub fn chat(effort: Effort, stops: Vec<String>) -> Self {
        Self::new(Source::Chat(Box::new(ResponseParser::new(effort))), stops)
    }

    fn new(source: Source, stops: Vec<String>) -> Self {
        Self {
            source,
            stops: StopStrings::new(stops),
            text: String::new(),
            reasoning: String::new(),
        }
    }

    /// Takes one id. Text that may be the beginning of a stop string is held back.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> Vec<Piece> {
        let events = match &mut self.source {
            Source::Raw(decoder) => vec![ResponseEvent::Response(decoder.push(tokenizer, id))],
            Source::Chat(parser) => parser.push(tokenizer, id),
        };
        self.take(events)
    }

    /// Gives out what was held back.
    pub fn finish(&mut self, tokenizer: &Tokenizer) -> Vec<Piece> {
        let events = match &mut self.source {
            Source::Raw(decoder) => vec![ResponseEvent::Response(decoder.finish())],
            Source::Chat(parser) => parser.finish(tokenizer),
        };
        let mut pieces = self.take(events);
        let rest = self.stops.finish();
        self.text.push_str(&rest);
        match pieces.last_mut() {
            Some(Piece::Text(last)) => last.push_str(&rest),
            _ if !rest.is_empty() => pieces.push(Piece::Text(rest)),
            _ => {}
        }
        pieces
    }

    /// Whether a stop string came.
    pub fn stopped(&self) -> bool {
        self.stops.found
    }

    fn take(&mut self, events: Vec<ResponseEvent>) -> Vec<Piece> {
        let mut pieces = vec![];
        for event in events {
            match event {
                ResponseEvent::Reasoning(text) => {
                    self.reasoning.push_str(&text);
                    pieces.push(Piece::Reasoning(text));
                }
                ResponseEvent::Response(text) => {
                    let text = self.stops.push(&text);
                    if !text.is_empty() {
                        self.text.push_str(&text);
                        pieces.push(Piece::Text(text));
                    }
                }
                _ => {}
            }
        }
        pieces
    }
}

/// Looks for the first of several strings in text that comes in pieces.
struct StopStrings {
    stops: Vec<String>,
    held: String,
    found: bool,
}

impl StopStrings {
    fn new(mut stops: Vec<String>) -> Self {
        stops.retain(|s| !s.is_empty());
        Self {
            stops,
            held: String::new(),
            found: false,
        }
    }

    /// What of the text so far can be shown.
    fn push(&mut self, text: &str) -> String {
        if self.found {
            return String::new();
        }
        self.held.push_str(text);
        let first = self.stops.iter().filter_map(|stop| self.held.find(stop.as_str())).min();
        if let Some(at) = first {
            self.found = true;
            self.held.truncate(at);
            return std::mem::take(&mut self.held);
        }
        let keep = self
            .stops
            .iter()
            .map(|stop| overlap(&self.held, stop))
            .max()
            .unwrap_or(0);
        let shown = self.held.len() - keep;
        self.held.drain(..shown).collect()
    }

    fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Bytes at the end of `text` that begin `stop`.
fn overlap(text: &str, stop: &str) -> usize {
    let lengths = stop.char_indices().map(|(at, _)| at).skip(1);
    lengths
        .filter(|&n| n <= text.len() && text.ends_with(&stop[..n]))
        .max()
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn show(stops: &[&str], pieces: &[&str]) -> (Vec<String>, bool) {
        let mut s = StopStrings::new(stops.iter().map(|s| s.to_string()).collect());
        let mut shown: Vec<String> = pieces.iter().map(|p| s.push(p)).collect();
        shown.push(s.finish());
        (shown, s.found)
    }

    #[test]
    fn a_stop_string_is_found_across_pieces() {
        assert_eq!(
            show(&["END"], &["abE", "N", "Dxyz"]),
            (vec!["ab".into(), "".into(), "".into(), "".into()], true)
        );
        assert_eq!(
            show(&["END"], &["abE", "N", "dx"]),
            (vec!["ab".into(), "".into(), "ENdx".into(), "".into()], false)
        );
        assert_eq!(
            show(&["aab"], &["aa", "ab"]),
            (vec!["".into(), "a".into(), "".into()], true)
        );
        assert_eq!(
            show(&["\n\n", "é!"], &["é", "\n"]),
            (vec!["".into(), "é".into(), "\n".into()], false)
        );
        assert_eq!(show(&[], &["x", "y"]), (vec!["x".into(), "y".into(), "".into()], false));
        assert_eq!(show(&["zz", "b"], &["abzz"]), (vec!["a".into(), "".into()], true));
    }
}
