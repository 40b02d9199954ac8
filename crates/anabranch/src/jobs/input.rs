//! The lines of the input, one after the other, and what each is called.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};

use serde_json::Value;
use sha2::{Digest, Sha256};

use super::fields::LineError;
use crate::error::Error;

/// A longer line is not read into memory; it gets an error.
pub const MAX_LINE_BYTES: usize = 16 << 20;

/// What some editors put in front of UTF-8.
const BYTE_ORDER_MARK: &[u8] = b"\xEF\xBB\xBF";

/// The first 128 bits of SHA-256 over the parts, each led by its length.
pub fn hash<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> u128 {
    let mut sha = Sha256::new();
    for part in parts {
        sha.update((part.len() as u64).to_le_bytes());
        sha.update(part);
    }
    first_bits(sha)
}

fn first_bits(sha: Sha256) -> u128 {
    let bytes = &sha.finalize()[..16];
    bytes.iter().fold(0, |bits, byte| bits << 8 | u128::from(*byte))
}

/// A line of the input.
pub struct Line {
    /// From 1.
    pub number: u64,
    /// Names the line and the settings that its answer depends on, and tells equal lines apart: the same in every run.
    pub key: u128,
    /// The line's own name, where it has one.
    pub custom_id: Option<String>,
    /// Its JSON, or what is wrong before any field is looked at.
    pub json: Result<Value, LineError>,
}

/// Reads the lines. Of those that have passed it keeps two numbers of 16 bytes each.
pub struct Input {
    path: PathBuf,
    file: BufReader<File>,
    settings: u128,
    number: u64,
    /// How often a line with this content came.
    contents: HashMap<u128, u64>,
    custom_ids: HashSet<u128>,
    /// The content of a line, here so that its memory is used again.
    text: Vec<u8>,
}

impl Input {
    /// `settings` is a hash of everything besides the line that its answer depends on.
    pub fn open(path: &Path, settings: u128) -> Result<Self, Error> {
        let file = File::open(path).map_err(|error| Error::file(path, "read", error))?;
        Ok(Self {
            path: path.to_owned(),
            file: BufReader::new(file),
            settings,
            number: 0,
            contents: HashMap::new(),
            custom_ids: HashSet::new(),
            text: vec![],
        })
    }

    /// The next line that is not blank.
    pub fn next(&mut self) -> Result<Option<Line>, Error> {
        loop {
            let read = self.read().map_err(|error| Error::file(&self.path, "read", error))?;
            let Some((content, bytes)) = read else {
                return Ok(None);
            };
            self.number += 1;
            let text = match self.number {
                1 => self.text.strip_prefix(BYTE_ORDER_MARK).unwrap_or(&self.text),
                _ => &self.text,
            };
            let text = text.trim_ascii();
            if text.is_empty() && bytes <= MAX_LINE_BYTES {
                continue;
            }
            let seen = self.contents.entry(content).or_default();
            let occurrence = *seen;
            *seen += 1;
            let key = hash([
                &self.settings.to_le_bytes()[..],
                &content.to_le_bytes(),
                &occurrence.to_le_bytes(),
            ]);
            let mut json = match bytes <= MAX_LINE_BYTES {
                true => serde_json::from_slice(text)
                    // The line is named beside; serde's is always the first of this text.
                    .map_err(|error| error.to_string().replace(" at line 1 column ", " at character "))
                    .map_err(|error| LineError::new("invalid_json", format!("found no JSON object: {error}"))),
                false => {
                    let message = format!("found a line of {bytes} bytes, expected at most {MAX_LINE_BYTES}");
                    Err(LineError::new("line_too_long", message))
                }
            };
            let named = json
                .as_ref()
                .ok()
                .and_then(|json: &Value| json.get("custom_id")?.as_str());
            let custom_id = named.map(str::to_owned);
            if custom_id
                .as_ref()
                .is_some_and(|id| !self.custom_ids.insert(hash([id.as_bytes()])))
            {
                let message = "custom_id: an earlier line has the same, expected another for each line";
                json = Err(LineError::new("duplicate_custom_id", message));
            }
            return Ok(Some(Line {
                number: self.number,
                key,
                custom_id,
                json,
            }));
        }
    }

    /// Reads up to the next line feed or the end. The hash and the length of what there was; its beginning is in `text`.
    fn read(&mut self) -> io::Result<Option<(u128, usize)>> {
        self.text.clear();
        let (mut sha, mut bytes) = (Sha256::new(), 0);
        loop {
            let buffer = self.file.fill_buf()?;
            if buffer.is_empty() {
                return Ok((bytes > 0).then(|| (first_bits(sha), bytes)));
            }
            let end = buffer.iter().position(|&byte| byte == b'\n');
            let part = &buffer[..end.unwrap_or(buffer.len())];
            sha.update(part);
            bytes += part.len();
            if bytes <= MAX_LINE_BYTES {
                self.text.extend_from_slice(part);
            } else {
                self.text = vec![];
            }
            let used = part.len() + usize::from(end.is_some());
            self.file.consume(used);
            if end.is_some() {
                return Ok(Some((first_bits(sha), bytes)));
            }
        }
    }
}
