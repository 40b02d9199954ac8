//! Texts from files, as token ids.

use std::path::Path;

use checkpoint::Checkpoint;
use checkpoint::chat::{Effort, Message, Role, render};
use checkpoint::tokenizer::Tokenizer;
use clap::ValueEnum;
use serde::Deserialize;

use crate::args::EffortName;
use crate::error::Error;
use crate::model;
use crate::run::read_text;
use crate::settings::Texts;

const IDS_FORM: &str =
    "a JSON object whose \"ids\" is a list of token ids, or a list of such lists, none of them empty";
const QUESTION_FORM: &str = "a JSON object such as {\"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}]}";

/// The model in `dir` and the texts for it, at least one, each of at least one of its tokens.
pub fn with_model(dir: &Path, texts: &Texts) -> Result<(Checkpoint, Vec<Vec<u32>>), Error> {
    let checkpoint = Checkpoint::open(dir)?;
    let texts = read(texts, &Tokenizer::load(dir)?)?;
    for ids in &texts {
        model::check_ids(&checkpoint, ids)?;
    }
    Ok((checkpoint, texts))
}

fn read(texts: &Texts, tokenizer: &Tokenizer) -> Result<Vec<Vec<u32>>, Error> {
    match texts {
        Texts::Plain(source) => match tokenizer.encode_ordinary(&read_text(source)?) {
            ids if ids.is_empty() => Err(Error::EmptyRaw),
            ids => Ok(vec![ids]),
        },
        Texts::Question(source) => {
            let question = Message::new(Role::User, read_text(source)?);
            Ok(vec![render(tokenizer, &[question], Effort::Off)])
        }
        Texts::Sample(text) => Ok(vec![tokenizer.encode_ordinary(text)]),
        Texts::Ids(path) => ids(path, &contents(path)?),
        Texts::Questions(path) => questions(path, &contents(path)?, tokenizer),
    }
}

fn contents(path: &Path) -> Result<String, Error> {
    std::fs::read_to_string(path).map_err(|source| {
        Error::Checkpoint(checkpoint::Error::Io {
            path: path.to_owned(),
            action: "read",
            source,
        })
    })
}

#[derive(Deserialize)]
struct IdsFile {
    ids: Ids,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Ids {
    One(Vec<u32>),
    Many(Vec<Vec<u32>>),
}

fn ids(path: &Path, text: &str) -> Result<Vec<Vec<u32>>, Error> {
    let form = |found: String| Error::Form {
        path: path.to_owned(),
        line: None,
        found,
        expected: IDS_FORM,
    };
    let file: IdsFile = serde_json::from_str(text).map_err(|e| form(format!("found other JSON ({e})")))?;
    let texts = match file.ids {
        Ids::One(ids) => vec![ids],
        Ids::Many(texts) => texts,
    };
    match texts.is_empty() || texts.iter().any(Vec::is_empty) {
        true => Err(form("found an empty list".to_owned())),
        false => Ok(texts),
    }
}

#[derive(Deserialize)]
struct Question {
    messages: Vec<Said>,
    #[serde(default)]
    effort: Option<String>,
}

#[derive(Deserialize)]
struct Said {
    role: String,
    content: String,
}

fn questions(path: &Path, text: &str, tokenizer: &Tokenizer) -> Result<Vec<Vec<u32>>, Error> {
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let prompts: Vec<Vec<u32>> = lines
        .map(|(number, line)| {
            question(line, tokenizer).map_err(|(found, expected)| Error::Form {
                path: path.to_owned(),
                line: Some(number + 1),
                found,
                expected,
            })
        })
        .collect::<Result<_, _>>()?;
    match prompts.is_empty() {
        true => Err(Error::Form {
            path: path.to_owned(),
            line: None,
            found: "found no line".to_owned(),
            expected: QUESTION_FORM,
        }),
        false => Ok(prompts),
    }
}

/// The prompt of one line, or what was found and expected.
fn question(line: &str, tokenizer: &Tokenizer) -> Result<Vec<u32>, (String, &'static str)> {
    let question: Question =
        serde_json::from_str(line).map_err(|e| (format!("found other JSON ({e})"), QUESTION_FORM))?;
    let effort = match question.effort.as_deref() {
        None => Effort::Off,
        Some(name) => EffortName::from_str(name, false)
            .map_err(|_| (format!("found effort {name:?}"), "off, low, high or max"))?
            .into(),
    };
    let role = |name: &str| {
        let roles = [Role::System, Role::User, Role::Assistant];
        let known = roles.into_iter().find(|role| role.name() == name);
        known.ok_or_else(|| (format!("found role {name:?}"), "system, user or assistant"))
    };
    let messages: Vec<Message> = question
        .messages
        .into_iter()
        .map(|said| Ok(Message::new(role(&said.role)?, said.content)))
        .collect::<Result<_, _>>()?;
    Ok(render(tokenizer, &messages, effort))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokenizer() -> Tokenizer {
        Tokenizer::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../demo/model")).unwrap()
    }

    #[test]
    fn ids_come_as_a_list_or_as_lists() {
        let path = Path::new("f.json");
        assert_eq!(ids(path, r#"{"about": "x", "ids": [1, 2]}"#).unwrap(), [[1, 2]]);
        assert_eq!(ids(path, r#"{"ids": [[1], [2, 3]]}"#).unwrap(), [vec![1], vec![2, 3]]);
        for (text, found) in [
            ("[1]", "found other JSON"),
            (r#"{"ids": [1, -2]}"#, "found other JSON"),
            (r#"{"ids": []}"#, "found an empty list"),
            (r#"{"ids": [[1], []]}"#, "found an empty list"),
            ("", "found other JSON"),
        ] {
            let error = ids(path, text).unwrap_err().to_string();
            assert!(error.starts_with(&format!("f.json: {found}")), "{error}");
            assert!(error.contains("expected a JSON object whose \"ids\""), "{error}");
        }
    }

    #[test]
    fn questions_are_rendered_as_run_renders_them() {
        let tokenizer = tokenizer();
        let text = "{\"messages\": [{\"role\": \"system\", \"content\": \"a\"}, {\"role\": \"user\", \"content\": \"b\"}]}\n\n\
                    {\"kind\": \"x\", \"effort\": \"low\", \"messages\": [{\"role\": \"user\", \"content\": \"b\"}]}\n";
        let got = questions(Path::new("f"), text, &tokenizer).unwrap();
        let (a, b) = (Message::new(Role::System, "a"), Message::new(Role::User, "b"));
        let want = [
            render(&tokenizer, &[a, b.clone()], Effort::Off),
            render(&tokenizer, &[b], Effort::Low),
        ];
        assert_eq!(got, want);
    }

    #[test]
    fn a_wrong_line_is_named() {
        for (line, parts) in [
            ("{", &["found other JSON", "expected a JSON object such as"][..]),
            (r#"{"messages": [{"role": "user"}]}"#, &["found other JSON", "content"]),
            (
                r#"{"messages": [{"role": "tool", "content": "x"}]}"#,
                &["found role \"tool\"", "expected system, user or assistant"],
            ),
            (
                r#"{"messages": [], "effort": "medium"}"#,
                &["found effort \"medium\"", "expected off, low, high or max"],
            ),
        ] {
            let text = format!("{{\"messages\": []}}\n{line}\n");
            let error = questions(Path::new("f.jsonl"), &text, &tokenizer())
                .unwrap_err()
                .to_string();
            assert!(error.starts_with("f.jsonl: line 2: "), "{error}");
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        }
        let error = questions(Path::new("f.jsonl"), "\n", &tokenizer())
            .unwrap_err()
            .to_string();
        assert!(error.starts_with("f.jsonl: found no line, expected"), "{error}");
    }
}
