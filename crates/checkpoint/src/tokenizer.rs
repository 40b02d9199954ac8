//! Text to token ids and back, as the published tokenizer does it.
//!
//! A checkpoint brings two files. `tiktoken.model` holds the merge ranks: a line for each token, its bytes in base64, a
//! space, its rank. `tokenizer_config.json` names the special tokens, which take the [`SPECIAL_TOKENS`] ids after the
//! ranks. Text is cut by a fixed pattern and each piece is merged on its own (byte-level BPE); nothing is normalised
//! and no space is put in front.
//!
//! Text from a user goes through [`Tokenizer::encode_ordinary`], which cannot yield a special id whatever the text
//! spells. Structure is made of ids ([`Tokenizer::control`]), see [`crate::chat`].

mod bpe;
mod load;
mod split;
mod stream;

use std::collections::HashMap;
use std::fmt;
use std::path::Path;

use bpe::{Merger, Ranks};
use load::Special;
pub use load::TokenizerError;
pub use stream::StreamDecoder;

/// File of the merge ranks in a checkpoint folder.
pub const RANKS_FILE: &str = "tiktoken.model";

/// File that names the special tokens in a checkpoint folder.
pub const CONFIG_FILE: &str = "tokenizer_config.json";

/// Number of ids after the ranks: named special tokens and reserved ones.
pub const SPECIAL_TOKENS: u32 = 256;

/// The vocabulary of a checkpoint: encodes, decodes, knows the special tokens.
pub struct Tokenizer {
    ranks: Ranks,
    /// Special token `i` has id `ranks.len() + i`.
    specials: Vec<Special>,
    ids: HashMap<String, u32>,
    control: ControlTokens,
}

/// Ids of the special tokens that have a meaning here.
///
/// The first four carry the chat format; a tokenizer without them is refused. The others are there when the checkpoint
/// names them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ControlTokens {
    /// `<|open|>` begins an opening tag.
    pub open: u32,
    /// `<|close|>` begins a closing tag.
    pub close: u32,
    /// `<|sep|>` ends either tag.
    pub sep: u32,
    /// `<|end_of_msg|>` ends a message; the model stops with it.
    pub end_of_msg: u32,
    /// `[BOS]`. Never put before a prompt.
    pub bos: Option<u32>,
    /// `[EOS]`, the end of a document.
    pub eos: Option<u32>,
    /// `<|media_begin|>` begins an image.
    pub media_begin: Option<u32>,
    /// `<|media_content|>` separates an image's description from its content.
    pub media_content: Option<u32>,
    /// `<|media_end|>` ends an image.
    pub media_end: Option<u32>,
    /// `<|media_pad|>` stands for one visual token.
    pub media_pad: Option<u32>,
}

/// What decoding does with special tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SpecialTokens {
    /// Spell them all.
    #[default]
    Keep,
    /// Leave out those that the publisher flags as special. `<|open|>`, `<|close|>` and `<|sep|>` are not flagged.
    Skip,
}

impl Tokenizer {
    /// Reads [`RANKS_FILE`] and [`CONFIG_FILE`] in `dir`.
    pub fn load(dir: &Path) -> Result<Tokenizer, TokenizerError> {
        let ranks = load::ranks(&dir.join(RANKS_FILE))?;
        let path = dir.join(CONFIG_FILE);
        let specials = load::specials(&path, ranks.len())?;
        let mut ids = HashMap::new();
        for (id, special) in (ranks.len()..).zip(&specials) {
            if let Some(first) = ids.insert(special.content.clone(), id) {
                let content = special.content.clone();
                return Err(TokenizerError::SameSpecial {
                    path,
                    content,
                    first,
                    second: id,
                });
            }
        }
        let needed = |content: &'static str| {
            ids.get(content).copied().ok_or_else(|| {
                let path = path.clone();
                TokenizerError::NoControlToken { path, content }
            })
        };
        let control = ControlTokens {
            open: needed("<|open|>")?,
            close: needed("<|close|>")?,
            sep: needed("<|sep|>")?,
            end_of_msg: needed("<|end_of_msg|>")?,
            bos: ids.get("[BOS]").copied(),
            eos: ids.get("[EOS]").copied(),
            media_begin: ids.get("<|media_begin|>").copied(),
            media_content: ids.get("<|media_content|>").copied(),
            media_end: ids.get("<|media_end|>").copied(),
            media_pad: ids.get("<|media_pad|>").copied(),
        };
        Ok(Tokenizer {
            ranks,
            specials,
            ids,
            control,
        })
    }

    /// Number of ordinary tokens; ids below it are ordinary, the [`SPECIAL_TOKENS`] from it on are special.
    pub fn base(&self) -> u32 {
        self.ranks.len()
    }

    /// Number of ids, special ones included.
    pub fn vocab_size(&self) -> u32 {
        self.ranks.len() + SPECIAL_TOKENS
    }

    /// Ids of the special tokens that have a meaning here.
    pub fn control(&self) -> &ControlTokens {
        &self.control
    }

    /// Id of the special token that is spelled `content`.
    pub fn special_id(&self, content: &str) -> Option<u32> {
        self.ids.get(content).copied()
    }

    /// Encodes text that may come from anybody. Every id is below [`base`](Self::base): where the text spells `<|open|>`,
    /// that is eight ordinary characters, never the token.
    pub fn encode_ordinary(&self, text: &str) -> Vec<u32> {
        let mut ids = Vec::with_capacity(text.len() / 3);
        let mut merger = Merger::default();
        for slice in split::slices(text) {
            self.encode_slice(slice, &mut merger, &mut ids);
        }
        ids
    }

    /// Encodes trusted text: what spells a special token becomes that token, the longest where several begin alike.
    pub fn encode_with_specials(&self, text: &str) -> Vec<u32> {
        let mut ids = Vec::with_capacity(text.len() / 3);
        let mut merger = Merger::default();
        for slice in split::slices(text) {
            let mut rest = slice;
            while let Some((at, len, id)) = self.next_special(rest) {
                self.encode_slice(&rest[..at], &mut merger, &mut ids);
                ids.push(id);
                rest = &rest[at + len..];
            }
            self.encode_slice(rest, &mut merger, &mut ids);
        }
        ids
    }

    fn encode_slice(&self, text: &str, merger: &mut Merger, ids: &mut Vec<u32>) {
        for piece in split::pieces(text) {
            merger.encode(&self.ranks, piece.as_bytes(), ids);
        }
    }

    /// The first special token spelled in `text`: where it begins, its length in bytes, its id.
    fn next_special(&self, text: &str) -> Option<(usize, usize, u32)> {
        text.char_indices().find_map(|(at, _)| {
            let begin = (self.base()..)
                .zip(&self.specials)
                .filter(|(_, special)| text[at..].starts_with(&special.content));
            let (id, special) = begin.max_by_key(|(_, special)| special.content.len())?;
            Some((at, special.content.len(), id))
        })
    }

    /// The bytes of a token, for a special one those of its name; `None` for an id outside the vocabulary. The bytes
    /// of an ordinary token need not be whole characters.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        match id.checked_sub(self.base()) {
            None => self.ranks.token(id),
            Some(at) => Some(self.specials.get(at as usize)?.content.as_bytes()),
        }
    }

    /// The bytes that decoding shows for `id`: an id outside the vocabulary is U+FFFD.
    fn shown_bytes(&self, id: u32, special: SpecialTokens) -> &[u8] {
        let skipped = special == SpecialTokens::Skip
            && id
                .checked_sub(self.base())
                .and_then(|at| self.specials.get(at as usize))
                .is_some_and(|special| special.flagged);
        match self.token_bytes(id) {
            Some(_) if skipped => b"",
            Some(bytes) => bytes,
            None => "\u{FFFD}".as_bytes(),
        }
    }

    /// The bytes of `ids` together. An id outside the vocabulary gives the bytes of U+FFFD.
    pub fn decode_bytes(&self, ids: &[u32], special: SpecialTokens) -> Vec<u8> {
        let shown = ids.iter().map(|&id| self.shown_bytes(id, special));
        shown.collect::<Vec<_>>().concat()
    }

    /// The text of `ids`; bytes that are no character become U+FFFD. For ids that are still arriving there is
    /// [`StreamDecoder`].
    pub fn decode(&self, ids: &[u32], special: SpecialTokens) -> String {
        String::from_utf8_lossy(&self.decode_bytes(ids, special)).into_owned()
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut tokenizer = f.debug_struct("Tokenizer");
        tokenizer.field("base", &self.base());
        tokenizer.field("control", &self.control).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The split pattern with its parts named, so that a part can be got wrong.
    const PATTERN: &str = r"HAN+|BEFOREUPPER*LOWER+REST|BEFOREUPPER+LOWER*REST|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    const PARTS: [(&str, &str); 5] = [
        ("HAN", r"[\p{Han}]"),
        ("BEFORE", r"[^\r\n\p{L}\p{N}]?"),
        ("UPPER", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"),
        ("LOWER", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"),
        ("REST", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"),
    ];

    /// How many of the 10,000 texts get other ids than tiktoken's when they are split by the pattern with `right` made `wrong`.
    fn differing(tokenizer: &Tokenizer, cases: &[(String, Vec<u32>)], right: &str, wrong: &str) -> usize {
        let parts = PARTS.iter();
        let pattern = parts.fold(PATTERN.to_string(), |p, (name, part)| p.replace(name, part));
        assert!(pattern.contains(right), "{right}");
        let pattern = fancy_regex::Regex::new(&pattern.replace(right, wrong)).unwrap();
        let differs = |(text, ids): &&(String, Vec<u32>)| {
            let mut merger = Merger::default();
            let mut split = Vec::new();
            for piece in pattern.find_iter(text) {
                merger.encode(&tokenizer.ranks, piece.unwrap().as_str().as_bytes(), &mut split);
            }
            &split != ids
        };
        cases.iter().filter(differs).count()
    }

    #[test]
    fn a_wrong_split_shows() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/tiktoken");
        let tokenizer = Tokenizer::load(&dir).unwrap();
        let cases = std::fs::read_to_string(dir.join("cases.txt")).unwrap();
        let case = |line: &str| {
            let (text, ids) = line.split_once('\t').unwrap();
            let ids = ids.split_whitespace().map(|id| id.parse().unwrap());
            (serde_json::from_str(text).unwrap(), ids.collect())
        };
        let cases: Vec<(String, Vec<u32>)> = cases.lines().map(case).collect();
        assert_eq!(differing(&tokenizer, &cases, "", ""), 0);
        let mistakes = [
            ("no split at all", "[", "(?s:.)+|["),
            ("Han with other letters", r"&&[^\p{Han}]", ""),
            ("no case border", r"\p{Lu}\p{Lt}", r"\p{L}"),
            ("titlecase with lowercase", r"\p{Ll}", r"\p{Ll}\p{Lt}"),
            ("marks are no letters", r"\p{M}", ""),
            ("modifier letters left out", r"\p{Lm}", ""),
            ("nothing before a word", r"[^\r\n\p{L}\p{N}]?", ""),
            ("only a space before a word", r"[^\r\n\p{L}\p{N}]?", " ?"),
            ("no contractions", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", ""),
            ("lowercase contractions only", "(?i:", "(?:"),
            (
                "long s is no contraction",
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
                r"(?:'[sS]|(?i:'t|'re|'ve|'m|'ll|'d))?",
            ),
            ("numbers unlimited", r"{1,3}", "+"),
            ("only decimal digits are numbers", r"\p{N}{1,3}", r"\p{Nd}{1,3}|\p{N}"),
            ("punctuation without its newlines", r"[\r\n]*", ""),
            ("punctuation without its space", r" ?[^\s", r"[^\s"),
            ("newlines as other whitespace", r"\s*[\r\n]+|", ""),
            ("no look-ahead", r"\s+(?!\S)|", ""),
            (
                "ASCII separators as whitespace",
                r"|\s+(?!\S)|\s+",
                r"|[\s\x1C-\x1F]+(?!\S)|[\s\x1C-\x1F]+",
            ),
        ];
        for (mistake, right, wrong) in mistakes {
            let count = differing(&tokenizer, &cases, right, wrong);
            assert!(count > 0, "{mistake} makes no difference");
        }
    }
}
