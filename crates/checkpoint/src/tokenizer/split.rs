//! Cutting text into the pieces that are merged separately.

use std::sync::LazyLock;

use regex::{Regex, RegexBuilder};

/// Long texts are encoded in slices of this many characters.
const SLICE_CHARS: usize = 400_000;

/// Within a slice, a run of whitespace, or of anything else, is cut each time it grows past this many characters.
const RUN_CHARS: usize = 25_000;

/// The published split pattern less its one look-ahead, which [`piece_len`] supplies: a regular expression without
/// look-around runs in linear time and cannot fail.
static PATTERN: LazyLock<Regex> = LazyLock::new(|| {
    let upper = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]";
    let lower = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]";
    let contraction = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?";
    let alternatives = [
        r"[\p{Han}]+",
        &format!(r"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{contraction}"),
        &format!(r"[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{contraction}"),
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+",
    ];
    // Anchored: some alternative matches at every position, so a search has nothing to skip.
    RegexBuilder::new(&format!("^(?:{})", alternatives.join("|")))
        .dfa_size_limit(8 << 20)
        .build()
        .expect("the pattern is constant and tested")
});

/// The pieces of `text`, in order; together they are `text`.
pub(super) fn pieces(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let (piece, after) = rest.split_at(piece_len(rest));
        rest = after;
        Some(piece)
    })
}

/// Length in bytes of the first piece of `text`, which is not empty.
///
/// The published pattern ends with `\s+(?!\S)|\s+`. Both are reached only by whitespace without a newline, and only
/// such a piece ends with a whitespace character other than a newline. Before a non-space the look-ahead makes the
/// first of them give its last character back; a single one is then left to the second.
fn piece_len(text: &str) -> usize {
    let len = PATTERN.find(text).map_or(text.len(), |found| found.end());
    let piece = &text[..len];
    match piece.chars().next_back() {
        Some(last) if last.is_whitespace() && !matches!(last, '\r' | '\n') && len < text.len() => {
            let shorter = len - last.len_utf8();
            if shorter == 0 { len } else { shorter }
        }
        _ => len,
    }
}

/// The cuts that are made before the pattern applies, as in the published tokenizer: no piece crosses one.
pub(super) fn slices(text: &str) -> Vec<&str> {
    if text.len() <= RUN_CHARS {
        return vec![text];
    }
    let mut slices = Vec::new();
    let (mut start, mut slice_chars) = (0, 0);
    let (mut run, mut run_is_space) = (0, false);
    for (at, c) in text.char_indices() {
        if slice_chars == SLICE_CHARS {
            slices.push(&text[start..at]);
            (start, slice_chars, run) = (at, 0, 0);
        }
        slice_chars += 1;
        if run == 0 || is_python_space(c) != run_is_space {
            (run, run_is_space) = (1, is_python_space(c));
        } else if run == RUN_CHARS {
            slices.push(&text[start..at]);
            (start, run) = (at, 1);
        } else {
            run += 1;
        }
    }
    slices.push(&text[start..]);
    slices
}

/// Python's `str.isspace` for one character: Unicode White_Space and the four ASCII separators.
fn is_python_space(c: char) -> bool {
    c.is_whitespace() || matches!(c, '\u{1C}'..='\u{1F}')
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The published pattern, whole.
    fn published() -> fancy_regex::Regex {
        let upper = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]";
        let lower = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]";
        let rest = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?";
        let pattern = format!(
            r"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{rest}|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{rest}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        );
        fancy_regex::RegexBuilder::new(&pattern)
            .backtrack_limit(usize::MAX)
            .build()
            .unwrap()
    }

    fn assert_same(published: &fancy_regex::Regex, text: &str) {
        let want: Vec<&str> = published.find_iter(text).map(|found| found.unwrap().as_str()).collect();
        assert_eq!(pieces(text).collect::<Vec<_>>(), want, "{text:?}");
    }

    #[test]
    fn equals_the_published_pattern() {
        let published = published();
        // One or two of each class, with each kind of whitespace and what the case-insensitive contractions can match.
        let alphabet = "aZ\u{1C5}\u{2B0}ªあ\u{301}\u{903}漢々〇\u{16FF0}ー1٣½'sStTrReEvVmMlLdD\u{17F}\u{2019}.<😀\u{200D}\0\u{E000}\u{378}\n\r\t\u{B} \u{1C}\u{85}\u{A0}\u{2028}\u{3000}";
        let characters: Vec<char> = alphabet.chars().collect();
        for &first in &characters {
            for &second in &characters {
                for &third in &characters {
                    assert_same(&published, &String::from_iter([first, second, third]));
                }
            }
        }
        let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
            cases: 3000,
            failure_persistence: None,
            ..ProptestConfig::default()
        });
        let texts = prop::collection::vec(
            prop_oneof![6 => prop::sample::select(characters), 1 => any::<char>()],
            0..40,
        );
        let checked = runner.run(&texts, |text| {
            assert_same(&published, &String::from_iter(text));
            Ok(())
        });
        checked.unwrap();
    }

    #[test]
    fn every_character_belongs_to_a_piece() {
        for c in '\0'..=char::MAX {
            let text = String::from_iter([c]);
            assert!(PATTERN.is_match(&text), "{c:?}");
        }
    }

    #[test]
    fn long_runs_take_the_same_pieces_and_no_error() {
        let published = published();
        for unit in [
            " ", "a", "A", "\n", "漢", "1", ".", "\u{301}", "'s", " a", "  ", "\u{1C}", "\r\n", "Aa",
        ] {
            for tail in ["", "x", " ", "\n", "!"] {
                assert_same(&published, &(unit.repeat(RUN_CHARS / unit.len()) + tail));
            }
        }
    }

    #[test]
    fn cuts_fall_where_the_published_tokenizer_makes_them() {
        let lengths = |text: &str| -> Vec<usize> {
            let slices = slices(text);
            assert_eq!(slices.concat(), text);
            slices.iter().map(|s| s.chars().count()).collect()
        };
        assert_eq!(lengths(""), [0]);
        assert_eq!(lengths(&"é".repeat(25_000)), [25_000]);
        assert_eq!(lengths(&"é".repeat(25_001)), [25_000, 1]);
        assert_eq!(lengths(&" ".repeat(60_000)), [25_000, 25_000, 10_000]);
        // U+001C counts as whitespace here, though `\s` does not match it.
        assert_eq!(lengths(&"\u{1C} ".repeat(12_501)), [25_000, 2]);
        // The slice keeps what came before the run.
        let text = format!("one two {}", "x".repeat(25_001));
        assert_eq!(lengths(&text), [25_008, 1]);
        assert_eq!(lengths(&"ab ".repeat(140_000)), [400_000, 20_000]);
        // A slice border starts a new run.
        let text = "ab ".repeat(130_000) + &"y".repeat(34_000);
        assert_eq!(lengths(&text), [400_000, 24_000]);
    }
}
