//! Text from tokens that arrive one by one.

use super::{SpecialTokens, Tokenizer};

/// Turns ids, or bytes, into text piece by piece and never emits half a character.
///
/// What it returns, put together, is `String::from_utf8_lossy` of all the bytes: bytes that cannot be part of a
/// character become U+FFFD, but bytes that may still begin one are held back (three at most) until they are decided.
///
/// ```
/// use checkpoint::tokenizer::StreamDecoder;
///
/// let mut stream = StreamDecoder::default();
/// assert_eq!(stream.push_bytes(b"caf\xC3"), "caf");
/// assert_eq!(stream.push_bytes(b"\xA9"), "\u{E9}");
/// assert_eq!(stream.push_bytes(b"\xE6\xBC"), "");
/// assert_eq!(stream.finish(), "\u{FFFD}");
/// ```
#[derive(Debug, Clone, Default)]
pub struct StreamDecoder {
    special: SpecialTokens,
    /// The beginning of a character, not yet whole.
    held: Vec<u8>,
}

impl StreamDecoder {
    /// A decoder that treats special tokens as told.
    pub fn new(special: SpecialTokens) -> StreamDecoder {
        StreamDecoder {
            special,
            held: Vec::new(),
        }
    }

    /// Takes one id and returns the text that is now certain, often empty.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> String {
        self.push_bytes(tokenizer.shown_bytes(id, self.special))
    }

    /// Takes bytes and returns the text that is now certain.
    pub fn push_bytes(&mut self, bytes: &[u8]) -> String {
        self.held.extend_from_slice(bytes);
        let mut text = String::new();
        let mut undecided = 0;
        let mut chunks = self.held.utf8_chunks().peekable();
        while let Some(chunk) = chunks.next() {
            text.push_str(chunk.valid());
            let invalid = chunk.invalid();
            if chunks.peek().is_none() && begins_character(invalid) {
                undecided = invalid.len();
            } else if !invalid.is_empty() {
                text.push(char::REPLACEMENT_CHARACTER);
            }
        }
        self.held.drain(..self.held.len() - undecided);
        text
    }

    /// Ends the text: a character that never became whole is U+FFFD. The decoder can then begin another text.
    pub fn finish(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.held)).into_owned()
    }
}

/// Whether more bytes can make these a character.
fn begins_character(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Bytes that are often text and often nearly so.
    fn bytes() -> impl Strategy<Value = Vec<u8>> {
        let part = prop_oneof![
            any::<char>().prop_map(|c| c.to_string().into_bytes()),
            prop::sample::select(vec!['é', '漢', '😀', 'a', '\u{FFFD}']).prop_map(|c| c.to_string().into_bytes()),
            any::<char>().prop_map(|c| {
                let mut bytes = c.to_string().into_bytes();
                bytes.pop();
                bytes
            }),
            prop::sample::select(vec![0x80, 0xBF, 0xC0, 0xC3, 0xE0, 0xED, 0xA0, 0xF0, 0xF4, 0x90, 0xFF])
                .prop_map(|b| vec![b]),
        ];
        prop::collection::vec(part, 0..12).prop_map(|parts| parts.concat())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        #[test]
        fn any_cut_gives_the_lossy_text(bytes in bytes(), seed in any::<u64>()) {
            let whole = String::from_utf8_lossy(&bytes);
            let mut stream = StreamDecoder::default();
            let mut text = String::new();
            let (mut rest, mut seed) = (bytes.as_slice(), seed);
            while !rest.is_empty() {
                let (now, later) = rest.split_at((seed % 4) as usize % (rest.len() + 1));
                text += &stream.push_bytes(now);
                // What is out is final, and what is held is less than a character.
                prop_assert!(whole.starts_with(&text));
                prop_assert!(stream.held.len() <= 3);
                rest = later;
                seed = seed.rotate_left(7).wrapping_mul(0x9E37_79B9_7F4A_7C15) + 1;
            }
            prop_assert_eq!(text + &stream.finish(), whole);
        }

        #[test]
        fn whole_characters_come_out_at_once(text in any::<String>()) {
            let mut stream = StreamDecoder::default();
            for c in text.chars() {
                let mut utf8 = [0; 4];
                let bytes = c.encode_utf8(&mut utf8).as_bytes();
                let (last, before) = bytes.split_last().unwrap();
                for &byte in before {
                    prop_assert_eq!(stream.push_bytes(&[byte]), "");
                }
                prop_assert_eq!(stream.push_bytes(&[*last]), c.to_string());
            }
            prop_assert_eq!(stream.finish(), "");
        }
    }
}
