//! Conversations as token ids, in the format that Kimi K3 was trained on, and the model's answer taken apart again.
//!
//! The format looks like XML, but its brackets are special tokens:
//!
//! ```text
//! opening tag   <|open|> tag ( ' ' key '="' value '"' )* <|sep|>
//! closing tag   <|close|> tag <|sep|>
//! message       opening tag "message" with its role, body, closing tag, <|end_of_msg|>
//! ```
//!
//! [`render`] makes a prompt, [`ResponseParser`] reads what the model generates after it. Both work on ids, never on
//! text that is encoded or searched as a whole: structure is made of ids alone, and each stretch of text between is
//! encoded by itself without special tokens. So a text that spells a tag is a text.

mod parse;

use crate::tokenizer::Tokenizer;
pub use parse::{ResponseEvent, ResponseParser};

/// Who speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// Instructions from whoever deploys the model.
    System,
    /// The person.
    User,
    /// The model.
    Assistant,
}

impl Role {
    /// The name in the format.
    pub fn name(self) -> &'static str {
        match self {
            Role::System => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
        }
    }
}

/// One message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// Who speaks.
    pub role: Role,
    /// What is said.
    pub content: String,
    /// What an assistant thought before it. Not read for other roles.
    pub reasoning: Option<String>,
    /// The speaker's name, where there are several.
    pub name: Option<String>,
}

impl Message {
    /// A message without reasoning or name.
    pub fn new(role: Role, content: impl Into<String>) -> Message {
        Message {
            role,
            content: content.into(),
            reasoning: None,
            name: None,
        }
    }
}

/// How much the model is told to think.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Effort {
    /// No thinking at all: the answer begins at once, and earlier reasoning is left out of the prompt.
    Off,
    /// Thinking, with no word on how much.
    Unspecified,
    /// Little.
    Low,
    /// Much.
    High,
    /// As much as it takes: the publisher's default.
    #[default]
    Max,
}

impl Effort {
    /// The value that the prompt states, if it states one.
    pub fn stated(self) -> Option<&'static str> {
        match self {
            Effort::Off | Effort::Unspecified => None,
            Effort::Low => Some("low"),
            Effort::High => Some("high"),
            Effort::Max => Some("max"),
        }
    }

    /// Whether the model thinks before it answers.
    pub fn thinks(self) -> bool {
        self != Effort::Off
    }
}

/// Element names, each used by the writer and the parser.
const MESSAGE: &str = "message";
const THINK: &str = "think";
const RESPONSE: &str = "response";

/// The prompt of a conversation: the effort, the messages, and the beginning of the assistant's next message up to where
/// the model goes on. No `[BOS]` is put in front.
pub fn render(tokenizer: &Tokenizer, messages: &[Message], effort: Effort) -> Vec<u32> {
    let mut prompt = Writer::new(tokenizer);
    if let Some(value) = effort.stated() {
        let attributes = [("role", Role::System.name()), ("type", "thinking-effort")];
        prompt.message(&attributes, |body| body.text(&effort_text(value)));
    }
    for message in messages {
        let mut attributes = vec![("role", message.role.name())];
        attributes.extend(message.name.as_deref().map(|name| ("name", name)));
        prompt.message(&attributes, |body| match message.role {
            Role::System | Role::User => body.text(&message.content),
            Role::Assistant => assistant_body(body, message, effort),
        });
    }
    prompt.open(MESSAGE, &[("role", Role::Assistant.name())]);
    prompt.open(if effort.thinks() { THINK } else { RESPONSE }, &[]);
    prompt.ids
}

/// An assistant's message has its think element even when there was no thought, unless thinking is off.
fn assistant_body(body: &mut Writer, message: &Message, effort: Effort) {
    if effort.thinks() {
        let reasoning = message.reasoning.as_deref().unwrap_or_default();
        let blank = reasoning.trim().is_empty();
        body.element(THINK, if blank { "" } else { reasoning });
    }
    body.element(RESPONSE, &message.content);
}

/// The wording that the model was trained with.
fn effort_text(value: &str) -> String {
    format!(
        "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), \
         supported values include `low`, `medium`, `high`, and `max`.\n\
         Now the system is invoked with `thinking_effort={value}`."
    )
}

/// Writes tags as ids and everything else as ordinary text, each piece encoded on its own.
struct Writer<'t> {
    tokenizer: &'t Tokenizer,
    ids: Vec<u32>,
}

impl<'t> Writer<'t> {
    fn new(tokenizer: &'t Tokenizer) -> Writer<'t> {
        Writer {
            tokenizer,
            ids: Vec::new(),
        }
    }

    fn message(&mut self, attributes: &[(&str, &str)], body: impl FnOnce(&mut Writer<'t>)) {
        self.open(MESSAGE, attributes);
        body(self);
        self.close(MESSAGE);
        self.ids.push(self.tokenizer.control().end_of_msg);
    }

    fn element(&mut self, tag: &str, text: &str) {
        self.open(tag, &[]);
        self.text(text);
        self.close(tag);
    }

    fn open(&mut self, tag: &str, attributes: &[(&str, &str)]) {
        self.ids.push(self.tokenizer.control().open);
        self.text(tag);
        for (key, value) in attributes {
            self.text(&format!(" {key}"));
            self.text("=\"");
            self.text(&escape(value));
            self.text("\"");
        }
        self.ids.push(self.tokenizer.control().sep);
    }

    fn close(&mut self, tag: &str) {
        self.ids.push(self.tokenizer.control().close);
        self.text(tag);
        self.ids.push(self.tokenizer.control().sep);
    }

    fn text(&mut self, text: &str) {
        self.ids.extend(self.tokenizer.encode_ordinary(text));
    }
}

/// An attribute's value. Bodies are never escaped.
fn escape(value: &str) -> String {
    value.replace('&', "&amp;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_escaped_once() {
        assert_eq!(escape(r#"a "b" & &quot;"#), "a &quot;b&quot; &amp; &amp;quot;");
    }
}
