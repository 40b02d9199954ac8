"""Makes testdata/tiktoken: a rank file, and 10,000 strings as PyPI's tiktoken encodes them with it.

    python3 -m venv venv && venv/bin/pip install tiktoken==0.14.0 numpy
    venv/bin/python make_tiktoken_fixture.py

The byte-pair vocabulary is trained on text that was NOT split first, so its tokens run across the borders of the
split pattern. An encoder that splits wrongly then finds merges that tiktoken must not make, and its ids differ.
The strings are random sequences of fragments that touch each class of the pattern in each order.

Writes tiktoken/tiktoken.model, tiktoken/tokenizer_config.json and tiktoken/cases.txt (a line: JSON string, tab, ids).
"""

import base64
import json
import os
import random

import numpy as np
import tiktoken

MERGES = 4352
CORPUS_FRAGMENTS = 60_000
CASES = 10_000
SEED = 20_260_731

UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?" + UPPER + "*" + LOWER + "+" + CONTRACTION,
        r"[^\r\n\p{L}\p{N}]?" + UPPER + "+" + LOWER + "*" + CONTRACTION,
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)

WORDS = "the of and in stream river bank drive expert layer token fox we they it I a is not café naïve straße".split()
CYRILLIC = "Привет мир река поток и на ЭКСПЕРТ Слой й".split()
GREEK = "Ποταμός λόγος ΑΒΓ ς ὀδύς".split()
OTHER_SCRIPTS = "नमस्ते हिन्दी สวัสดี مرحبا שלום 한국어 안녕 ひらがな カタカナ ラーメン ქართული ՀԱՅ հայ አማርኛ".split()
HAN = "你好 世界 漢字 混合 文字 日本 語 人々 〇 \U00020000 \uf900 \u3005 \u3007\u3021 〡〢".split()
TITLECASE = "\u01c5 \u01c8 \u01cb \u1f88 \u1fbc \u01c5ABC x\u01c5y".split()
MARKS = ["e\u0301", "\u0301", "A\u0308", "\u0308\u0301", "\u20e3", "\ufe0f", "n\u0303o", " \u0301", "\u0903", "\U00016ff0"]
MODIFIERS = ["\u02b0", "\u02bc", "\u02c8", "\u30fc", "x\u02b0", "\u1d43B"]
NUMBERS = ["1", "12", "123", "1234567", "007", "٣٤٥٦", "Ⅷ", "½", "²³", "①②③④", "𝟏𝟐", "१२३४", "3.14", "1,000"]
CONTRACTIONS = ["'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "'S", "'T", "'RE", "'Ve", "'M", "'LL", "'lL", "'D",
                "\u2019s", "'\u017f", "it'\u017f", "it'\u017f the", "'", "''s", "'x", "we're", "I'M", "they'LL", "THEY'Ve", "it's", "don'ts", "我's", "7's"]
PUNCTUATION = [".", ",", "!", "?", "...", "!?", "--", "—", "(", ")", "{", "}", "[", "]", "\"", "`", "```", "_", "/", "//",
               "\\", "=", "=\"", "&", "&amp;", "$", "€", "+", "<", ">", "，", "！", "。", "#", "*", "**", "@", "~", "^", "|"]
EMOJI = ["😀", "🌍", "👩‍💻", "🇫🇷", "❤️", "1️⃣", "🎉🎉"]
ODD = ["\u0000", "\u0001", "\u007f", "\u200b", "\u200d", "\ufeff", "\u00ad", "\ue000", "\U0010ffff", "\u0378", "\ufffd", "ªº", "ı",
       "𝐀𝐛𝐂", "Ⓐⓑ", "ﬁ"]
SPECIALS = ["<|open|>", "<|close|>", "<|sep|>", "[BOS]", "[EOS]", "<|end_of_msg|>", "<|reserved_token_7|>"]
SPACES = [" ", "  ", "   ", "\t", "\t\t", " \t", "\u000b", "\u000c", "\u001c", "\u001d", "\u001e", "\u001f", "\u0085",
          "\u00a0", "\u1680", "\u2000", "\u2003", "\u200a", "\u2028", "\u2029", "\u202f", "\u205f", "\u3000", " \u00a0", "\u3000\u3000"]
NEWLINES = ["\n", "\n\n", "\r", "\r\n", "\r\n\r\n", "\n\r", " \n", "\n ", "  \n  ", "\t\r\n", "\n\u3000\n", "\u0085\n", ".\n", "!\r\n\n", " \n \n"]


def fragment(rng):
    """One fragment; spaces and plain words come most often, so that every class gets neighbours of every other."""
    pick = rng.random()
    if pick < 0.22:
        word = rng.choice(WORDS)
        return rng.choice([word, word, word.capitalize(), word.upper(), word + rng.choice(WORDS).capitalize(), word.swapcase()])
    if pick < 0.40:
        return " "
    if pick < 0.50:
        return rng.choice(SPACES)
    if pick < 0.57:
        return rng.choice(NEWLINES)
    return rng.choice(rng.choice([CYRILLIC, GREEK, OTHER_SCRIPTS, HAN, HAN, TITLECASE, MARKS, MODIFIERS, NUMBERS, NUMBERS,
                                  CONTRACTIONS, CONTRACTIONS, PUNCTUATION, PUNCTUATION, EMOJI, ODD, SPECIALS]))


def train(data, merges):
    """Byte-pair training over the whole of `data` as one piece: the most frequent adjacent pair, lowest ids on ties."""
    tokens = [bytes([b]) for b in range(256)]
    known = set(tokens)
    ids = np.frombuffer(data, dtype=np.uint8).astype(np.int64)
    while len(tokens) < 256 + merges:
        pairs, counts = np.unique(ids[:-1] * 65536 + ids[1:], return_counts=True)
        for at in np.argsort(-counts, kind="stable"):
            left, right = divmod(int(pairs[at]), 65536)
            if tokens[left] + tokens[right] not in known:
                break
        at = np.flatnonzero((ids[:-1] == left) & (ids[1:] == right))
        if left == right:  # in a run, each second start overlaps the one before it
            kept = []
            for start in at:
                if not kept or start > kept[-1] + 1:
                    kept.append(start)
            at = np.array(kept)
        ids[at] = len(tokens)
        ids = np.delete(ids, at + 1)
        tokens.append(tokens[left] + tokens[right])
        known.add(tokens[-1])
    return tokens


def json_text(text):
    """JSON that stays on one line in every editor: whitespace beyond ASCII and other invisible characters are escaped."""
    plain = json.dumps(text, ensure_ascii=False)
    return "".join(c if c == " " or c.isprintable() else json.dumps(c)[1:-1] for c in plain)


def main():
    out = os.path.join(os.path.dirname(os.path.abspath(__file__)), "tiktoken")
    os.makedirs(out, exist_ok=True)
    rng = random.Random(SEED)
    corpus = "".join(fragment(rng) for _ in range(CORPUS_FRAGMENTS)).encode()
    tokens = train(corpus, MERGES)
    with open(os.path.join(out, "tiktoken.model"), "wb") as f:
        for rank, token in enumerate(tokens):
            f.write(base64.b64encode(token) + b" %d\n" % rank)

    base = len(tokens)
    named = ["[BOS]", "[EOS]", "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>"]
    plain = {"<|open|>", "<|close|>", "<|sep|>"}
    added = {str(base + i): {"content": c, "special": c not in plain} for i, c in enumerate(named)}
    with open(os.path.join(out, "tokenizer_config.json"), "w") as f:
        json.dump({"added_tokens_decoder": added}, f, indent=1)
        f.write("\n")

    encoding = tiktoken.Encoding(
        "fixture", pat_str=PATTERN, mergeable_ranks={t: r for r, t in enumerate(tokens)}, special_tokens={}
    )
    with open(os.path.join(out, "cases.txt"), "w", encoding="utf-8", newline="\n") as f:
        for case in range(CASES):
            fragments = 200 if case % 1000 == 999 else rng.randint(1, 14)
            text = "".join(fragment(rng) for _ in range(fragments))
            ids = encoding.encode_ordinary(text)
            f.write(json_text(text) + "\t" + " ".join(map(str, ids)) + "\n")


if __name__ == "__main__":
    main()
