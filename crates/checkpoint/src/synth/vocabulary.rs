//! The small files beside the weights: generation settings and a vocabulary in which every text can be written.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Value, json};

use crate::config::{K3Config, SPECIAL_TOKENS};

/// The fewest ids of a vocabulary: every byte, and the special tokens.
pub(super) const MIN_VOCAB: usize = 256 + SPECIAL_TOKENS;

/// Named special tokens: offset from the first, text, and whether a decoder drops it with the other specials.
/// (Kimi K3 `tokenizer_config.json`; the offsets between are reserved.)
const SPECIALS: [(u32, &str, bool); 16] = [
    (0, "[BOS]", true),
    (1, "[EOS]", true),
    (2, "<|end_of_msg|>", true),
    (3, "<|open|>", false),
    (4, "<|close|>", false),
    (5, "<|sep|>", false),
    (6, "[start_header_id]", true),
    (7, "[end_header_id]", true),
    (9, "[EOT]", true),
    (18, "<|media_begin|>", true),
    (19, "<|media_content|>", true),
    (20, "<|media_end|>", true),
    (21, "<|media_pad|>", true),
    (65, "<osagent_mode>", true),
    (254, "[UNK]", true),
    (255, "[PAD]", true),
];

const CONSONANTS: &[u8] = b"bcdfghjklmnpqrstvwxyz";
const VOWELS: &[u8] = b"aeiou";

/// `generation_config.json`.
pub(super) fn generation_config(config: &K3Config) -> String {
    let json = json!({"max_length": config.max_position_embeddings, "eos_token_id": config.eos_token_id});
    format!("{json:#}\n")
}

/// `tokenizer_config.json`.
pub(super) fn tokenizer_config(config: &K3Config) -> String {
    let added: Map<String, Value> = SPECIALS
        .iter()
        .map(|(offset, content, special)| {
            let token = json!({"content": content, "lstrip": false, "normalized": false, "rstrip": false,
                "single_word": false, "special": special});
            ((config.first_special_id() + offset).to_string(), token)
        })
        .collect();
    let json = json!({
        "added_tokens_decoder": added,
        "additional_special_tokens": ["<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>"],
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "tokenizer_class": "TikTokenTokenizer",
    });
    format!("{json:#}\n")
}

/// `tiktoken.model`: a line `base64(bytes) rank` for each id below the special ones.
pub(super) fn tiktoken_model(config: &K3Config) -> String {
    let tokens = tokens(config.vocab_size - SPECIAL_TOKENS);
    tokens
        .iter()
        .enumerate()
        .map(|(rank, token)| format!("{} {rank}\n", STANDARD.encode(token)))
        .collect()
}

/// The first `count` tokens: 256 single bytes, pairs of small letters, then strings of consonant, vowel, consonant
/// and so on, shortest first. Each of the last kind is one of the kind before with a letter more, so merges reach it.
fn tokens(count: usize) -> Vec<Vec<u8>> {
    let bytes = (0..=u8::MAX).map(|byte| vec![byte]);
    let pairs = (b'a'..=b'z').flat_map(|first| (b'a'..=b'z').map(move |second| vec![first, second]));
    let mut tokens: Vec<Vec<u8>> = bytes.chain(pairs).take(count).collect();
    let mut syllables: Vec<Vec<u8>> = CONSONANTS
        .iter()
        .flat_map(|&consonant| VOWELS.iter().map(move |&vowel| vec![consonant, vowel]))
        .collect();
    while tokens.len() < count {
        let letters = if syllables[0].len().is_multiple_of(2) {
            CONSONANTS
        } else {
            VOWELS
        };
        let longer = syllables
            .iter()
            .flat_map(|stem| letters.iter().map(move |&letter| [stem.as_slice(), &[letter]].concat()));
        syllables = longer.take(count - tokens.len()).collect();
        tokens.extend_from_slice(&syllables);
    }
    tokens
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn tokens_are_distinct_and_reachable_by_merges() {
        let tokens = tokens(20_000);
        let known: HashSet<&[u8]> = tokens.iter().map(Vec::as_slice).collect();
        assert_eq!(known.len(), 20_000);
        assert!((0..=255).all(|byte| tokens[usize::from(byte)] == [byte]));
        for token in tokens.iter().filter(|token| token.len() > 1) {
            assert!(known.contains(&token[..token.len() - 1]));
        }
    }
}
