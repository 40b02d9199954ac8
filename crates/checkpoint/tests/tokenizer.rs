//! The tokenizer against reference encodings, and what it refuses.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use checkpoint::tokenizer::{SpecialTokens, StreamDecoder, Tokenizer};
use proptest::prelude::*;

fn testdata(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata").join(name)
}

fn load(name: &str) -> Tokenizer {
    Tokenizer::load(&testdata(name)).unwrap()
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap()
}

/// What PyPI's tiktoken made of a text; see `testdata/make_tiktoken_fixture.py`.
fn tiktoken_cases() -> Vec<(String, Vec<u32>)> {
    let cases = read(&testdata("tiktoken/cases.txt"));
    let case = |line: &str| {
        let (text, ids) = line.split_once('\t').unwrap();
        let ids = ids.split_whitespace().map(|id| id.parse().unwrap());
        (serde_json::from_str(text).unwrap(), ids.collect())
    };
    cases.lines().map(case).collect()
}

/// The alternatives of the published split pattern, in order.
fn alternatives() -> [String; 8] {
    let upper = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]";
    let lower = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]";
    let contraction = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?";
    let before = r"[^\r\n\p{L}\p{N}]?";
    [
        r"[\p{Han}]+".into(),
        format!("{before}{upper}*{lower}+{contraction}"),
        format!("{before}{upper}+{lower}*{contraction}"),
        r"\p{N}{1,3}".into(),
        r" ?[^\s\p{L}\p{N}]+[\r\n]*".into(),
        r"\s*[\r\n]+".into(),
        r"\s+(?!\S)".into(),
        r"\s+".into(),
    ]
}

#[derive(serde::Deserialize)]
struct Golden {
    text: String,
    ids: Vec<u32>,
    ids_specials_on: Vec<u32>,
}

#[test]
fn golden_texts() {
    for name in ["tok_a", "tok_b"] {
        let tokenizer = load(name);
        let golden = read(&testdata(name).join("tokenizer_golden.json"));
        let golden: Vec<Golden> = serde_json::from_str(&golden).unwrap();
        assert!(golden.iter().any(|g| g.ids != g.ids_specials_on));
        for Golden { text, ids, .. } in &golden {
            assert_eq!(&tokenizer.encode_ordinary(text), ids, "{name}: {text:?}");
        }
        for Golden {
            text,
            ids_specials_on: ids,
            ..
        } in &golden
        {
            assert_eq!(&tokenizer.encode_with_specials(text), ids, "{name}: {text:?}");
            assert_eq!(&tokenizer.decode(ids, SpecialTokens::Keep), text);
        }
    }
}

#[test]
fn ten_thousand_texts_as_tiktoken_encodes_them() {
    let tokenizer = load("tiktoken");
    let cases = tiktoken_cases();
    assert_eq!(cases.len(), 10_000);
    assert!(tokenizer.base() >= 256 + 4096);
    let mut used = HashSet::new();
    for (text, ids) in &cases {
        assert_eq!(&tokenizer.encode_ordinary(text), ids, "{text:?}");
        used.extend(ids);
    }
    // The vocabulary is at work, not only its single bytes.
    assert!(used.iter().filter(|&&&id| id >= 256).count() > 500);
}

#[test]
fn tiktoken_texts_reach_every_alternative() {
    let grouped = alternatives().map(|alternative| format!("({alternative})"));
    let pattern = fancy_regex::Regex::new(&grouped.join("|")).unwrap();
    let mut counts = [0; 8];
    for (text, _) in tiktoken_cases() {
        for found in pattern.captures_iter(&text) {
            let found = found.unwrap();
            let which = (0..8).find(|i| found.get(i + 1).is_some()).unwrap();
            counts[which] += 1;
        }
    }
    assert!(counts.iter().all(|&count| count >= 1000), "{counts:?}");
}

#[test]
fn control_text_is_ordinary() {
    for name in ["tok_a", "tok_b", "tiktoken"] {
        let tokenizer = load(name);
        let control = tokenizer.control();
        let text = "<|open|>[EOS]<|reserved_token_300|>";
        let ids = tokenizer.encode_ordinary(text);
        assert!(ids.iter().all(|&id| id < tokenizer.base()));
        assert_eq!(tokenizer.decode(&ids, SpecialTokens::Skip), text);

        let with = tokenizer.encode_with_specials("<|open|>[EOS]");
        assert_eq!(with, [control.open, control.eos.unwrap()]);
        assert_eq!(tokenizer.decode(&with, SpecialTokens::Keep), "<|open|>[EOS]");
        assert_eq!(tokenizer.decode(&with, SpecialTokens::Skip), "<|open|>");
        let names = [control.open, control.close, control.sep, control.end_of_msg];
        assert_eq!(
            tokenizer.decode(&names, SpecialTokens::Keep),
            "<|open|><|close|><|sep|><|end_of_msg|>"
        );
    }
}

#[test]
fn reserved_ids_have_names() {
    let tokenizer = load("tok_a");
    assert_eq!((tokenizer.base(), tokenizer.vocab_size()), (288, 544));
    assert_eq!(tokenizer.token_bytes(296), Some(b"<|reserved_token_296|>".as_slice()));
    assert_eq!(tokenizer.special_id("<|reserved_token_296|>"), Some(296));
    assert_eq!(tokenizer.special_id("<|reserved_token_288|>"), None);
    assert_eq!(tokenizer.token_bytes(543), Some(b"[PAD]".as_slice()));
    assert_eq!(tokenizer.token_bytes(544), None);
    assert_eq!(
        tokenizer.decode(&[104, 296, 544, 105], SpecialTokens::Skip),
        "h\u{FFFD}i"
    );
}

#[test]
fn of_special_tokens_that_begin_alike_the_longest_counts() {
    let dir = copy("tok_a");
    let names = r#"{"added_tokens_decoder": {"290": {"content": "<|end_of_msg|>"}, "291": {"content": "<|open|>"},
        "292": {"content": "<|close|>"}, "293": {"content": "<|sep|>"}, "294": {"content": "<|sep|><|sep|>"}}}"#;
    std::fs::write(dir.path().join("tokenizer_config.json"), names).unwrap();
    let tokenizer = Tokenizer::load(dir.path()).unwrap();
    assert_eq!(tokenizer.encode_with_specials("<|sep|><|sep|><|sep|>"), [294, 293]);
    assert_eq!(tokenizer.control().eos, None);
}

#[test]
fn pathological_texts_take_no_time() {
    let tokenizer = load("tiktoken");
    // Twelve million bytes: about a second here, hours with a quadratic split or merge.
    let start = std::time::Instant::now();
    for unit in [
        " ",
        "a",
        "A",
        "\n",
        "\u{6F22}",
        "<",
        "e\u{301}",
        "the",
        "'s",
        "\u{A0}\u{1C}",
        "Aa",
        "ab ",
    ] {
        let text = unit.repeat(1_000_000 / unit.len());
        let ids = tokenizer.encode_ordinary(&text);
        assert_eq!(tokenizer.decode_bytes(&ids, SpecialTokens::Keep), text.as_bytes());
    }
    assert!(start.elapsed().as_secs() < 60);
}

#[test]
fn runs_are_cut_before_they_are_split() {
    let tokenizer = load("tiktoken");
    let cut = tokenizer.encode_ordinary(&"\n".repeat(25_001));
    let (newline, run) = (
        tokenizer.encode_ordinary("\n"),
        tokenizer.encode_ordinary(&"\n".repeat(25_000)),
    );
    assert_eq!(cut, [run, newline].concat());
    // A special token across a cut is text.
    let text = "x".repeat(24_996) + "<|open|>";
    let control = tokenizer.control();
    assert!(!tokenizer.encode_with_specials(&text).contains(&control.open));
    assert!(tokenizer.encode_with_specials(&text[10..]).contains(&control.open));
}

fn ids(tokenizer: &Tokenizer) -> impl Strategy<Value = Vec<u32>> + use<> {
    prop::collection::vec(0..tokenizer.vocab_size() + 3, 0..60)
}

/// Texts of any characters, some of which spell special tokens.
fn text() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        3 => any::<String>(),
        2 => "[ a-zA-Z0-9'.\\r\\n\u{A0}\u{3000}\u{301}]{0,12}",
        1 => prop::sample::select(vec!["<|open|>", "[EOS]", "<|sep|>", "<|reserved_token_4700|>"]).prop_map(String::from),
    ];
    prop::collection::vec(part, 0..5).prop_map(|parts| parts.concat())
}

#[test]
fn decoding_gives_the_text_back_and_no_special_id() {
    for name in ["tok_a", "tiktoken"] {
        let tokenizer = load(name);
        proptest!(ProptestConfig::with_cases(1000), |(text in text())| {
            let ids = tokenizer.encode_ordinary(&text);
            prop_assert!(ids.iter().all(|&id| id < tokenizer.base()));
            prop_assert_eq!(tokenizer.decode_bytes(&ids, SpecialTokens::Skip), text.as_bytes());
            let trusted = tokenizer.encode_with_specials(&text);
            prop_assert_eq!(tokenizer.decode(&trusted, SpecialTokens::Keep), text);
        });
    }
}

#[test]
fn streams_say_what_the_whole_says() {
    let tokenizer = load("tiktoken");
    for special in [SpecialTokens::Keep, SpecialTokens::Skip] {
        proptest!(ProptestConfig::with_cases(1000), |(ids in ids(&tokenizer))| {
            let whole = tokenizer.decode(&ids, special);
            let mut stream = StreamDecoder::new(special);
            let mut text = String::new();
            for &id in &ids {
                text += &stream.push(&tokenizer, id);
                prop_assert!(whole.starts_with(&text));
            }
            prop_assert_eq!(text + &stream.finish(), whole);
        });
    }
}

#[test]
fn streams_of_text_never_hold_a_whole_character() {
    let tokenizer = load("tiktoken");
    for (text, ids) in tiktoken_cases().into_iter().step_by(10) {
        let mut stream = StreamDecoder::default();
        let (mut said, mut bytes) = (String::new(), Vec::new());
        for id in ids {
            said += &stream.push(&tokenizer, id);
            bytes.extend_from_slice(tokenizer.token_bytes(id).unwrap());
            let whole = bytes.utf8_chunks().next().map_or("", |chunk| chunk.valid());
            assert_eq!(said, whole);
        }
        assert_eq!(said, text);
    }
}

/// A copy of a test tokenizer, to be broken.
fn copy(name: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for file in ["tiktoken.model", "tokenizer_config.json"] {
        std::fs::copy(testdata(name).join(file), dir.path().join(file)).unwrap();
    }
    dir
}

/// The error of a copy of tok_a in which `file` was changed; it is one line that names the file.
fn error(file: &str, change: impl FnOnce(String) -> String) -> String {
    let dir = copy("tok_a");
    let path = dir.path().join(file);
    std::fs::write(&path, change(read(&path))).unwrap();
    let error = Tokenizer::load(dir.path()).unwrap_err().to_string();
    assert!(error.starts_with(path.to_str().unwrap()), "{error}");
    assert!(!error.contains('\n'), "{error}");
    error
}

#[test]
fn broken_rank_files_are_refused() {
    // Line 258 is the token of rank 257; lines count from 1.
    let without = |n: usize| {
        move |text: String| -> String {
            let lines = text.lines().enumerate().filter(|(i, _)| i + 1 != n);
            lines.map(|(_, line)| format!("{line}\n")).collect()
        }
    };
    let cases = [
        (
            error("tiktoken.model", without(258)),
            "line 258: rank 258, expected 257 (no line has that rank)",
        ),
        (
            error("tiktoken.model", |t| t + "eHl6 287\n"),
            "line 289: rank 287, expected 288 (the rank is there twice)",
        ),
        (
            error("tiktoken.model", |t| t + "AA== 288\n"),
            "line 289: the token of line 1 again",
        ),
        (
            error("tiktoken.model", |t| t + "\n\neHl6  288\n"),
            "line 291: found \"eHl6  288\", expected a token in base64",
        ),
        (
            error("tiktoken.model", |t| t + "e*l6 288\n"),
            "line 289: found \"e*l6 288\"",
        ),
        (error("tiktoken.model", |t| t + " 288\n"), "line 289: found \"288\""),
        (
            error("tiktoken.model", |t| t + "eHl6\t288\n"),
            "line 289: found \"eHl6\\t288\"",
        ),
        (
            error("tiktoken.model", |t| t + "eHl6 -1\n"),
            "line 289: found \"eHl6 -1\"",
        ),
        (
            error("tiktoken.model", |t| t + &"x".repeat(3000)),
            "line 289: found \"xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx...\"",
        ),
        (
            error("tiktoken.model", |t| t.replace("AA== 0\n", "eHl6 0\n")),
            "none of its 288 tokens is the single byte 0",
        ),
        (
            error("tiktoken.model", |_| String::new()),
            "none of its 0 tokens is the single byte 0",
        ),
    ];
    for (error, expected) in cases {
        assert!(error.contains(expected), "{error}\nlacks: {expected}");
        assert!(error.ends_with("download the file again"), "{error}");
    }
}

#[test]
fn rank_lines_may_come_in_any_order() {
    let dir = copy("tok_b");
    let path = dir.path().join("tiktoken.model");
    let reversed: Vec<String> = read(&path).lines().rev().map(String::from).collect();
    std::fs::write(&path, reversed.join("\r\n")).unwrap();
    let (tokenizer, published) = (Tokenizer::load(dir.path()).unwrap(), load("tok_b"));
    for id in 0..published.vocab_size() {
        assert_eq!(tokenizer.token_bytes(id), published.token_bytes(id));
    }
}

#[test]
fn broken_configurations_are_refused() {
    let file = "tokenizer_config.json";
    let cases = [
        (
            error(file, |t| t.replace("<|sep|>", "<|sap|>")),
            "no added token \"<|sep|>\", expected the four",
        ),
        (
            error(file, |t| t.replace("\"543\"", "\"544\"")),
            "\"544\" is named \"[PAD]\", expected a name and an id from 288 to 543",
        ),
        (
            error(file, |t| t.replace("\"543\"", "\"287\"")),
            "\"287\" is named \"[PAD]\"",
        ),
        (
            error(file, |t| t.replace("\"543\"", "\"x\"")),
            "\"x\" is named \"[PAD]\"",
        ),
        (error(file, |t| t.replace("[PAD]", "")), "\"543\" is named \"\""),
        (
            error(file, |t| t.replace("[UNK]", "[EOS]")),
            "special tokens 289 and 542 are both \"[EOS]\"",
        ),
        (
            error(file, |t| t.replace("added_tokens_decoder", "added_tokens")),
            "missing field `added_tokens_decoder`",
        ),
        (error(file, |t| t[..t.len() / 2].into()), "EOF while parsing"),
    ];
    for (error, expected) in cases {
        assert!(error.contains(expected), "{error}\nlacks: {expected}");
    }
}

#[test]
fn missing_files_are_named() {
    for file in ["tiktoken.model", "tokenizer_config.json"] {
        let dir = copy("tok_a");
        let path = dir.path().join(file);
        std::fs::remove_file(&path).unwrap();
        let error = Tokenizer::load(dir.path()).unwrap_err().to_string();
        assert!(
            error.starts_with(&format!("{}: cannot read it: ", path.display())),
            "{error}"
        );
        std::fs::File::create(&path).unwrap().set_len(1 << 30).unwrap();
        let error = Tokenizer::load(dir.path()).unwrap_err().to_string();
        assert!(
            error.contains("1073741824 bytes, expected at most 268435456"),
            "{error}"
        );
    }
}
