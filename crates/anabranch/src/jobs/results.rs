//! The file of results: one line for each line of the input that is done, appended in one write.
//!
//! What a line says depends on the input's line, the model and the settings, and on nothing else: no clock, no count. So a file that was
//! written in several runs has the lines of one that was written in a single run.

use std::collections::HashSet;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use engine::TrunkFormat;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::fields::LineError;
use super::request::Kind;
use crate::error::Error;

/// What every id begins with; the key of the input's line follows in 32 hexadecimal digits.
const ID_PREFIX: &str = "batch_req_";
/// Between two calls that bring results to the disk, past a loss of power. A killed process loses nothing anyway.
const SYNC_PAUSE: Duration = Duration::from_secs(5);
/// A longer line is no result.
const MAX_RESULT_BYTES: u64 = 256 << 20;
const EXPECTED: &str = "results of anabranch jobs";

/// Results, open for more.
pub struct Results {
    path: PathBuf,
    file: File,
    /// Keys of the lines that are done.
    done: HashSet<u128>,
    /// How many of them have an error.
    errors: u64,
    /// Bytes of whole lines, and of all that is there: a run that was killed may have left a part of a line.
    whole: u64,
    found: u64,
    synced: Instant,
}

/// Of a result, what tells whether its line is done.
#[derive(Deserialize)]
struct Done {
    id: String,
    #[serde(default)]
    error: Option<serde::de::IgnoredAny>,
}

#[derive(Serialize)]
struct ResultLine<'a> {
    id: String,
    custom_id: Option<&'a str>,
    response: Option<Response>,
    error: Option<ErrorObject<'a>>,
}

#[derive(Serialize)]
struct Response {
    status_code: u16,
    request_id: String,
    body: Value,
}

#[derive(Serialize)]
struct ErrorObject<'a> {
    #[serde(flatten)]
    error: &'a LineError,
    line: u64,
}

/// An answer and what is said about it.
pub struct Answered<'a> {
    pub kind: Kind,
    /// What answered.
    pub model: &'a str,
    /// Tells models, numerics and settings apart.
    pub fingerprint: u128,
    pub trunk: TrunkFormat,
    pub text: &'a str,
    pub reasoning: &'a str,
    pub finish_reason: &'static str,
    pub prompt_tokens: usize,
    pub completion_tokens: usize,
}

impl Results {
    /// Opens the file, new or as an earlier run left it, for this process alone. Nothing is changed yet.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let failed = |error| Error::file(path, "write", error);
        let file = OpenOptions::new()
            .read(true)
            .append(true)
            .create(true)
            .open(path)
            .map_err(failed)?;
        file.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => Error::ResultsInUse { path: path.to_owned() },
            TryLockError::Error(error) => failed(error),
        })?;
        let mut results = Self {
            path: path.to_owned(),
            done: HashSet::new(),
            errors: 0,
            whole: 0,
            found: 0,
            synced: Instant::now(),
            file: file.try_clone().map_err(failed)?,
        };
        results.read(file)?;
        Ok(results)
    }

    fn read(&mut self, file: File) -> Result<(), Error> {
        let mut file = BufReader::new(file);
        let mut line = vec![];
        for number in 1.. {
            line.clear();
            let read = (&mut file).take(MAX_RESULT_BYTES).read_until(b'\n', &mut line);
            let bytes = read.map_err(|error| Error::file(&self.path, "read", error))? as u64;
            if bytes == 0 {
                break;
            }
            self.found += bytes;
            if !line.ends_with(b"\n") {
                // Torn, if it is one of ours.
                let begin = format!("{{\"id\":\"{ID_PREFIX}");
                let common = line.len().min(begin.len());
                match line[..common] == begin.as_bytes()[..common] {
                    true => break,
                    false => return Err(self.foreign(number, "another text")),
                }
            }
            let done: Done = serde_json::from_slice(&line).map_err(|_| self.foreign(number, "another text"))?;
            let key = done
                .id
                .strip_prefix(ID_PREFIX)
                .and_then(|hex| u128::from_str_radix(hex, 16).ok());
            let key = key.ok_or_else(|| self.foreign(number, &format!("id {:?}", done.id)))?;
            if !self.done.insert(key) {
                return Err(self.foreign(number, "an id for the second time"));
            }
            self.errors += u64::from(done.error.is_some());
            self.whole += bytes;
        }
        Ok(())
    }

    fn foreign(&self, number: usize, found: &str) -> Error {
        Error::Form {
            path: self.path.clone(),
            line: Some(number),
            found: format!("found {found}"),
            expected: EXPECTED,
        }
    }

    /// Whether this line is done.
    pub fn has(&self, key: u128) -> bool {
        self.done.contains(&key)
    }

    /// Lines that are done, and how many of them have an error.
    pub fn counts(&self) -> (u64, u64) {
        (self.done.len() as u64, self.errors)
    }

    /// Cuts off the part of a line that a killed run left.
    pub fn mend(&mut self) -> Result<(), Error> {
        if self.found > self.whole {
            let cut = self.file.set_len(self.whole);
            cut.map_err(|error| Error::file(&self.path, "cut off the torn last line", error))?;
            self.found = self.whole;
        }
        Ok(())
    }

    /// Appends an answer.
    pub fn answer(&mut self, key: u128, custom_id: &str, answered: &Answered<'_>) -> Result<(), Error> {
        self.append(
            key,
            &ResultLine {
                id: format!("{ID_PREFIX}{key:032x}"),
                custom_id: Some(custom_id),
                response: Some(Response {
                    status_code: 200,
                    request_id: format!("req_{key:032x}"),
                    body: answered.body(key),
                }),
                error: None,
            },
        )
    }

    /// Appends what is wrong with a line.
    pub fn error(&mut self, key: u128, custom_id: Option<&str>, line: u64, error: &LineError) -> Result<(), Error> {
        self.errors += 1;
        self.append(
            key,
            &ResultLine {
                id: format!("{ID_PREFIX}{key:032x}"),
                custom_id,
                response: None,
                error: Some(ErrorObject { error, line }),
            },
        )
    }

    fn append(&mut self, key: u128, line: &ResultLine<'_>) -> Result<(), Error> {
        let mut write = || -> io::Result<()> {
            let mut text = serde_json::to_vec(line)?;
            text.push(b'\n');
            // The file is open for appending and has no buffer: one write.
            self.file.write_all(&text)?;
            if self.synced.elapsed() >= SYNC_PAUSE {
                self.file.sync_data()?;
                self.synced = Instant::now();
            }
            Ok(())
        };
        write().map_err(|error| Error::file(&self.path, "write", error))?;
        self.done.insert(key);
        Ok(())
    }

    /// Brings all to the disk.
    pub fn finish(&mut self) -> Result<(), Error> {
        let synced = self.file.sync_data();
        synced.map_err(|error| Error::file(&self.path, "write", error))
    }
}

impl Answered<'_> {
    /// The body of the response, in OpenAI's shape. `created` is 0: a clock would make results differ.
    fn body(&self, key: u128) -> Value {
        let (prefix, object, mut choice) = match self.kind {
            Kind::Chat(_) => {
                let message = json!({"role": "assistant", "content": self.text});
                ("chatcmpl", "chat.completion", json!({"index": 0, "message": message}))
            }
            Kind::Completion => ("cmpl", "text_completion", json!({"index": 0, "text": self.text})),
        };
        if let Kind::Chat(effort) = self.kind
            && effort.thinks()
        {
            choice["message"]["reasoning_content"] = self.reasoning.into();
        }
        choice["logprobs"] = Value::Null;
        choice["finish_reason"] = self.finish_reason.into();
        let mut body = json!({
            "id": format!("{prefix}-{key:032x}"),
            "object": object,
            "created": 0,
            "model": self.model,
            "system_fingerprint": format!("fp_{:032x}", self.fingerprint),
            "choices": [choice],
            "usage": {
                "prompt_tokens": self.prompt_tokens,
                "completion_tokens": self.completion_tokens,
                "total_tokens": self.prompt_tokens + self.completion_tokens,
            },
        });
        if !self.trunk.is_exact() {
            body["trunk"] = self.trunk.label().into();
        }
        body
    }
}
