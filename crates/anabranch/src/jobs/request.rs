//! A line of the input as a request, or why it is none.

use checkpoint::chat::{Effort, Message, Role, render};
use checkpoint::tokenizer::Tokenizer;
use clap::ValueEnum;
use engine::{Request, Sampling};
use serde::Deserialize;
use serde_json::{Value, json};

use super::fields::{Fields, LineError, short};
use crate::args::EffortName;

/// What the lines are read with.
pub struct Reader<'a> {
    pub tokenizer: &'a Tokenizer,
    pub stop_ids: Vec<u32>,
    /// Ids that the model has.
    pub vocabulary: usize,
    /// Positions that a sequence may reach, and what says so.
    pub positions: usize,
    pub limited_by: &'static str,
    /// Where a line does not say.
    pub effort: Effort,
    pub max_tokens: usize,
}

/// What is asked.
#[derive(Debug)]
pub struct Job {
    pub custom_id: String,
    /// The model that the line asks for.
    pub model: Option<String>,
    pub kind: Kind,
    pub request: Request,
    pub stops: Vec<String>,
}

/// How the answer is read and shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Chat(Effort),
    Completion,
}

impl Job {
    /// Positions that its sequence needs.
    pub fn positions(&self) -> usize {
        self.request.prompt.len() + self.request.max_tokens
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Prompt {
    Text(String),
    Ids(Vec<u32>),
}

impl Reader<'_> {
    /// Reads a line that is JSON.
    pub fn job(&self, line: Value) -> Result<Job, LineError> {
        let mut fields = Fields::of(line, "")?;
        let custom_id: String = fields.need("custom_id", "a text")?;
        let method: String = fields.need("method", "\"POST\"")?;
        if method != "POST" {
            return Err(fields.wrong("invalid_method", "method", &format!("{method:?}"), "\"POST\""));
        }
        const URLS: &str = "\"/v1/chat/completions\" or \"/v1/completions\"";
        let url: String = fields.need("url", URLS)?;
        let body: Value = fields.need("body", "a JSON object")?;
        let body = Fields::of(body, "body")?;
        let job = match url.as_str() {
            "/v1/chat/completions" => self.chat(custom_id, body),
            "/v1/completions" => self.completion(custom_id, body),
            _ => Err(fields.wrong("invalid_url", "url", &format!("{url:?}"), URLS)),
        }?;
        fields.end()?;
        Ok(job)
    }

    fn chat(&self, custom_id: String, mut body: Fields) -> Result<Job, LineError> {
        let said: Vec<Value> = body.need("messages", "a list of messages")?;
        if said.is_empty() {
            return Err(body.wrong("invalid_value", "messages", "none", "at least one message"));
        }
        let messages = said
            .into_iter()
            .enumerate()
            .map(|(number, said)| message(said, number))
            .collect::<Result<Vec<Message>, _>>()?;
        const EFFORTS: &str = "one of off, none, low, high, max";
        let effort = match body.take::<String>("reasoning_effort", EFFORTS)?.as_deref() {
            None => self.effort,
            Some("none") => Effort::Off,
            Some(name) => EffortName::from_str(name, false)
                .map_err(|_| body.wrong("unsupported_value", "reasoning_effort", &format!("{name:?}"), EFFORTS))?
                .into(),
        };
        for (name, neutral) in [
            ("logprobs", json!(false)),
            ("tools", json!([])),
            ("response_format", json!({"type": "text"})),
        ] {
            body.only(name, &neutral)?;
        }
        let prompt = render(self.tokenizer, &messages, effort);
        self.finish(custom_id, body, Kind::Chat(effort), prompt)
    }

    fn completion(&self, custom_id: String, mut body: Fields) -> Result<Job, LineError> {
        let prompt = match body.need("prompt", "one text, or one list of token ids")? {
            Prompt::Text(text) => self.tokenizer.encode_ordinary(&text),
            Prompt::Ids(ids) => ids,
        };
        if prompt.is_empty() {
            return Err(body.wrong("invalid_value", "prompt", "nothing", "at least one token"));
        }
        if let Some(id) = prompt.iter().find(|&&id| id as usize >= self.vocabulary) {
            let expected = format!("ids from 0 to {}", self.vocabulary - 1);
            return Err(body.wrong("invalid_value", "prompt", &id.to_string(), &expected));
        }
        for (name, neutral) in [("echo", json!(false)), ("best_of", json!(1))] {
            body.only(name, &neutral)?;
        }
        self.finish(custom_id, body, Kind::Completion, prompt)
    }

    /// What both kinds have.
    fn finish(&self, custom_id: String, mut body: Fields, kind: Kind, prompt: Vec<u32>) -> Result<Job, LineError> {
        let model = body.take("model", "a text")?;
        // Names of whoever asks; they change no answer.
        let _: Option<String> = body.take("user", "a text")?;
        let _: Option<serde_json::Map<String, Value>> = body.take("metadata", "a JSON object")?;
        for (name, neutral) in [
            ("n", json!(1)),
            ("stream", json!(false)),
            ("presence_penalty", json!(0)),
            ("frequency_penalty", json!(0)),
            ("logit_bias", json!({})),
        ] {
            body.only(name, &neutral)?;
        }
        let sampling = sampling(&mut body, &custom_id)?;
        let stops = match body.take("stop", "a text or a list of texts")? {
            None => vec![],
            Some(OneOrMany::One(stop)) => vec![stop],
            Some(OneOrMany::Many(stops)) => stops,
        };
        if stops.iter().any(String::is_empty) {
            return Err(body.wrong(
                "invalid_value",
                "stop",
                "an empty text",
                "texts of at least one character",
            ));
        }
        let max_tokens = self.max_tokens(&mut body)?;
        body.end()?;
        let whole = prompt.len().saturating_add(max_tokens);
        if whole > self.positions {
            return Err(LineError::new(
                "context_length_exceeded",
                format!(
                    "a prompt of {} tokens and {max_tokens} new ones make {whole}, expected at most {} ({})",
                    prompt.len(),
                    self.positions,
                    self.limited_by
                ),
            ));
        }
        Ok(Job {
            custom_id,
            model,
            kind,
            request: Request {
                prompt,
                max_tokens,
                stop_ids: self.stop_ids.clone(),
                sampling,
            },
            stops,
        })
    }

    fn max_tokens(&self, body: &mut Fields) -> Result<usize, LineError> {
        const EXPECTED: &str = "a whole number from 1 up";
        let older = body.within("max_tokens", EXPECTED, |n: &usize| *n > 0)?;
        let newer = body.within("max_completion_tokens", EXPECTED, |n: &usize| *n > 0)?;
        match (older, newer) {
            (Some(a), Some(b)) if a != b => {
                let expected = format!("the same as max_completion_tokens ({b}), or only one of both");
                Err(body.wrong("invalid_value", "max_tokens", &a.to_string(), &expected))
            }
            _ => Ok(older.or(newer).unwrap_or(self.max_tokens)),
        }
    }
}

fn sampling(body: &mut Fields, custom_id: &str) -> Result<Sampling, LineError> {
    let all = Sampling::default();
    let temperature = body.within("temperature", "a number from 0 up", |t: &f32| {
        *t >= 0.0 && t.is_finite()
    })?;
    let top_p = body.within("top_p", "a number above 0 and up to 1", |p: &f32| *p > 0.0 && *p <= 1.0)?;
    let top_k = body.take("top_k", "a whole number from 0 up")?;
    let min_p = body.within("min_p", "a number from 0 to 1", |p: &f32| (0.0..=1.0).contains(p))?;
    let seed: Option<i64> = body.take("seed", "a whole number of 64 bits")?;
    Ok(Sampling {
        temperature: temperature.unwrap_or(all.temperature),
        top_p: top_p.unwrap_or(all.top_p),
        top_k: top_k.unwrap_or(all.top_k),
        min_p: min_p.unwrap_or(all.min_p),
        // Lines that ask the same shall not all draw the same, and yet draw the same in every run.
        seed: seed.map_or_else(|| super::input::hash([custom_id.as_bytes()]) as u64, |seed| seed as u64),
    })
}

/// A message of a conversation.
fn message(said: Value, number: usize) -> Result<Message, LineError> {
    let mut said = Fields::of(said, format!("body.messages[{number}]"))?;
    const ROLES: &str = "one of system, developer, user, assistant";
    let name: String = said.need("role", ROLES)?;
    let role = match name.as_str() {
        "system" | "developer" => Role::System,
        "user" => Role::User,
        "assistant" => Role::Assistant,
        _ => return Err(said.wrong("unsupported_value", "role", &format!("{name:?}"), ROLES)),
    };
    const CONTENT: &str = "a text, or a list of parts of type text";
    let content = match said.need("content", CONTENT)? {
        Value::String(text) => text,
        Value::Array(parts) => parts
            .into_iter()
            .enumerate()
            .map(|(part, value)| text_part(value, format!("body.messages[{number}].content[{part}]")))
            .collect::<Result<String, _>>()?,
        other => return Err(said.wrong("invalid_type", "content", &short(&other), CONTENT)),
    };
    let mut message = Message::new(role, content);
    message.name = said.take("name", "a text")?;
    if role == Role::Assistant {
        message.reasoning = said.take("reasoning_content", "a text")?;
    }
    said.end()?;
    Ok(message)
}

fn text_part(part: Value, path: String) -> Result<String, LineError> {
    let mut part = Fields::of(part, path)?;
    let kind: String = part.need("type", "\"text\"")?;
    if kind != "text" {
        return Err(part.wrong("unsupported_value", "type", &format!("{kind:?}"), "\"text\""));
    }
    let text = part.need("text", "a text")?;
    part.end()?;
    Ok(text)
}
