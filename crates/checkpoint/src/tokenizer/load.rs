//! Reading and checking the two tokenizer files.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;

use super::SPECIAL_TOKENS;
use super::bpe::Ranks;

/// Largest tokenizer file that is read, in bytes. Published ones are below 3 MB.
const MAX_FILE_BYTES: u64 = 256 << 20;

/// A special token by its place after the ranks.
pub(super) struct Special {
    pub(super) content: String,
    /// As the publisher flags it: whether a decoder that skips special tokens skips this one.
    pub(super) flagged: bool,
}

/// A line of the rank file: its number from 1, its rank, and where its token lies among the decoded bytes.
struct RankLine {
    line: usize,
    rank: u32,
    bytes: std::ops::Range<usize>,
}

/// The table in a rank file.
pub(super) fn ranks(path: &Path) -> Result<Ranks, TokenizerError> {
    let mut bytes = Vec::new();
    let mut lines = Vec::new();
    for (line, content) in (1..).zip(read(path)?.split(|&b| b == b'\n')) {
        let content = content.trim_ascii();
        if content.is_empty() {
            continue;
        }
        let start = bytes.len();
        let rank = parse_rank_line(content, &mut bytes).ok_or_else(|| TokenizerError::RankLine {
            path: path.into(),
            line,
            found: shorten(content),
        })?;
        let bytes = start..bytes.len();
        lines.push(RankLine { line, rank, bytes });
    }
    lines.sort_by_key(|line| line.rank);
    for (expected, at) in (0..).zip(&lines) {
        if at.rank != expected {
            let (path, line, found) = (path.into(), at.line, at.rank);
            return Err(TokenizerError::RankOrder {
                path,
                line,
                found,
                expected,
            });
        }
    }
    let tokens = lines.iter().map(|line| &bytes[line.bytes.clone()]);
    let ranks = Ranks::new(tokens).map_err(|(first, second)| TokenizerError::SameToken {
        path: path.into(),
        line: lines[second as usize].line,
        first: lines[first as usize].line,
    })?;
    match (0..=255).find(|&byte| ranks.rank(&[byte]).is_none()) {
        Some(byte) => Err(TokenizerError::NoByte {
            path: path.into(),
            byte,
            ranks: ranks.len(),
        }),
        None => Ok(ranks),
    }
}

/// `base64(token) SP rank`: appends the token to `bytes` and returns the rank. `None` when the line is not of that form or
/// the token is empty.
fn parse_rank_line(content: &[u8], bytes: &mut Vec<u8>) -> Option<u32> {
    let space = content.iter().position(|&b| b == b' ')?;
    let (token, rank) = (&content[..space], &content[space + 1..]);
    let before = bytes.len();
    STANDARD.decode_vec(token, bytes).ok()?;
    let rank = std::str::from_utf8(rank).ok()?.parse().ok()?;
    (bytes.len() > before).then_some(rank)
}

/// The part of `tokenizer_config.json` that is read.
#[derive(Deserialize)]
struct Config {
    added_tokens_decoder: BTreeMap<String, AddedToken>,
}

#[derive(Deserialize)]
struct AddedToken {
    content: String,
    #[serde(default)]
    special: bool,
}

/// The special tokens in the order of their ids, the first of which is `base`.
pub(super) fn specials(path: &Path, base: u32) -> Result<Vec<Special>, TokenizerError> {
    let config: Config = serde_json::from_slice(&read(path)?).map_err(|source| TokenizerError::Config {
        path: path.into(),
        source,
    })?;
    let mut specials: Vec<Special> = (base..base + SPECIAL_TOKENS)
        .map(|id| Special {
            content: format!("<|reserved_token_{id}|>"),
            flagged: true,
        })
        .collect();
    for (id, token) in config.added_tokens_decoder {
        let at = id.parse::<u32>().ok().and_then(|id| id.checked_sub(base));
        let special = at.and_then(|at| specials.get_mut(at as usize));
        match special {
            Some(special) if !token.content.is_empty() => {
                special.content = token.content;
                special.flagged = token.special;
            }
            _ => {
                return Err(TokenizerError::SpecialId {
                    path: path.into(),
                    found: shorten(id.as_bytes()),
                    content: token.content,
                    first: base,
                    last: base + SPECIAL_TOKENS - 1,
                });
            }
        }
    }
    Ok(specials)
}

fn read(path: &Path) -> Result<Vec<u8>, TokenizerError> {
    let failed = |source| TokenizerError::Read {
        path: path.into(),
        source,
    };
    let found = std::fs::metadata(path).map_err(failed)?.len();
    if found > MAX_FILE_BYTES {
        let path = path.into();
        return Err(TokenizerError::TooLarge { path, found });
    }
    std::fs::read(path).map_err(failed)
}

/// The beginning of what a file holds, fit for one line of an error.
fn shorten(found: &[u8]) -> String {
    const SHOWN: usize = 40;
    let shown = found[..found.len().min(SHOWN)].escape_ascii().to_string();
    if found.len() > SHOWN { shown + "..." } else { shown }
}

/// Why a tokenizer cannot be loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// A file cannot be read.
    #[error("{}: cannot read it: {source}; the checkpoint folder needs this file as published", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// A file is too large to be a tokenizer's.
    #[error("{}: {found} bytes, expected at most {MAX_FILE_BYTES}; this is no tokenizer file, download it again", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Its size in bytes.
        found: u64,
    },
    /// A line of the rank file is malformed.
    #[error("{} line {line}: found \"{found}\", expected a token in base64, one space, its rank; download the file again", path.display())]
    RankLine {
        /// The rank file.
        path: PathBuf,
        /// Line number from 1.
        line: usize,
        /// How the line begins.
        found: String,
    },
    /// Ranks do not count up from 0: a rank is missing or there twice.
    #[error("{} line {line}: rank {found}, expected {expected} ({}); download the file again", path.display(), if found < expected { "the rank is there twice" } else { "no line has that rank" })]
    RankOrder {
        /// The rank file.
        path: PathBuf,
        /// Line number from 1.
        line: usize,
        /// The rank on that line.
        found: u32,
        /// The rank that comes next in order.
        expected: u32,
    },
    /// Two lines of the rank file hold the same token.
    #[error("{} line {line}: the token of line {first} again, expected each token once; download the file again", path.display())]
    SameToken {
        /// The rank file.
        path: PathBuf,
        /// Line number of the second, from 1.
        line: usize,
        /// Line number of the first, from 1.
        first: usize,
    },
    /// A single byte is no token, so that not every text can be encoded.
    #[error("{}: none of its {ranks} tokens is the single byte {byte}, expected all 256 bytes; download the file again", path.display())]
    NoByte {
        /// The rank file.
        path: PathBuf,
        /// The byte.
        byte: u8,
        /// Number of tokens in the file.
        ranks: u32,
    },
    /// The configuration is not JSON of the expected form.
    #[error("{}: {source}; expected the tokenizer's published configuration with added_tokens_decoder, download it again", path.display())]
    Config {
        /// The configuration file.
        path: PathBuf,
        /// What the parser says.
        source: serde_json::Error,
    },
    /// An added token has an id outside the special ids, or no name.
    #[error("{}: added token \"{found}\" is named \"{content}\", expected a name and an id from {first} to {last}, which follow the ranks of tiktoken.model; take both files from one release", path.display())]
    SpecialId {
        /// The configuration file.
        path: PathBuf,
        /// The id as written.
        found: String,
        /// Its content.
        content: String,
        /// The first special id.
        first: u32,
        /// The last special id.
        last: u32,
    },
    /// Two special tokens are spelled alike.
    #[error("{}: special tokens {first} and {second} are both \"{content}\", expected different names; download the file again", path.display())]
    SameSpecial {
        /// The configuration file.
        path: PathBuf,
        /// The name.
        content: String,
        /// The lower id.
        first: u32,
        /// The higher id.
        second: u32,
    },
    /// A token that the chat format needs is not among the special tokens.
    #[error("{}: no added token \"{content}\", expected the four of the chat format (<|open|>, <|close|>, <|sep|>, <|end_of_msg|>); take the file from the model's own release", path.display())]
    NoControlToken {
        /// The configuration file.
        path: PathBuf,
        /// The token's name.
        content: &'static str,
    },
}
