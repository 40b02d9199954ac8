"""Byte-level BPE in the publisher's form (tiktoken ranks), 256 special ids above it, and the chat format.

    python tokenizer.py BUILD_DIR     trains on BUILD_DIR/text and writes BUILD_DIR/tiktoken.model

Digits are never merged, so numbers are read digit by digit: a model of this size then learns arithmetic as columns.
"""
import base64
import collections
import functools
import glob
import heapq
import os
import sys

import regex

BASE = 4096                     # ranks; the special ids follow
VOCAB = BASE + 256
EOS, END, OPEN, CLOSE, SEP = BASE + 1, BASE + 2, BASE + 3, BASE + 4, BASE + 5
UNK, PAD = BASE + 254, BASE + 255
SPECIALS = {0: "[BOS]", 1: "[EOS]", 2: "<|end_of_msg|>", 3: "<|open|>", 4: "<|close|>", 5: "<|sep|>",
            6: "[start_header_id]", 7: "[end_header_id]", 9: "[EOT]", 18: "<|media_begin|>",
            19: "<|media_content|>", 20: "<|media_end|>", 21: "<|media_pad|>", 65: "<osagent_mode>", 254: "[UNK]",
            255: "[PAD]"}
STRUCTURAL = (3, 4, 5)          # special=false in tokenizer_config.json: kept by decoders that drop specials

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLIT = regex.compile("|".join([
    r"[\p{Han}]+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
]), regex.V1)

EFFORT_TEXT = ("`thinking_effort` guides on how much to think in your thinking channel (not including the response "
               "channel), supported values include `low`, `medium`, `high`, and `max`.\n"
               "Now the system is invoked with `thinking_effort={}`.")


class Tokenizer:
    def __init__(self, path):
        self.ranks = {}
        for line in open(path, "rb"):
            token, rank = line.split()
            self.ranks[base64.b64decode(token)] = int(rank)
        assert len(self.ranks) == BASE
        self.bytes = {rank: token for token, rank in self.ranks.items()}

    @functools.lru_cache(maxsize=200_000)
    def _piece(self, piece):
        whole = self.ranks.get(piece)
        if whole is not None:
            return (whole,)
        parts = [piece[i:i + 1] for i in range(len(piece))]
        while len(parts) > 1:
            best = min(range(len(parts) - 1), key=lambda i: self.ranks.get(parts[i] + parts[i + 1], BASE))
            if parts[best] + parts[best + 1] not in self.ranks:
                break
            parts[best:best + 2] = [parts[best] + parts[best + 1]]
        return tuple(self.ranks[p] for p in parts)

    def encode(self, text):
        ids = []
        for m in SPLIT.finditer(text):
            ids += self._piece(m.group().encode())
        return ids

    def decode(self, ids):
        return b"".join(self.bytes[i] if i < BASE else b"" for i in ids).decode("utf-8", "replace")

    # ---------------------------------------------------------------- chat
    @functools.lru_cache(maxsize=1000)
    def open(self, tag, *attributes):
        """<|open|> tag key="value" ... <|sep|>; every piece of text is encoded on its own."""
        ids = [OPEN] + self.encode(tag)
        for key, value in attributes:
            value = value.replace("&", "&amp;").replace('"', "&quot;")
            ids += self.encode(" " + key) + self.encode('="') + self.encode(value) + self.encode('"')
        return ids + [SEP]

    @functools.lru_cache(maxsize=1000)
    def close(self, tag):
        return [CLOSE] + self.encode(tag) + [SEP]

    def message(self, role, text, *attributes):
        return (self.open("message", ("role", role), *attributes) + self.encode(text) + self.close("message") + [END])

    def effort(self, effort):
        return self.message("system", EFFORT_TEXT.format(effort), ("type", "thinking-effort"))

    def assistant(self, think, response):
        """(prefix that a prompt ends with, the part that the model writes). think None: instruct mode."""
        head = self.open("message", ("role", "assistant"))
        if think is None:
            head, body = head + self.open("response"), []
        else:
            head, body = head + self.open("think"), self.encode(think) + self.close("think") + self.open("response")
        return head, body + self.encode(response) + self.close("response") + self.close("message") + [END]

    def response(self, ids, thinking):
        """The response text of generated ids, or None when the message did not end by itself in the right form."""
        if not ids or ids[-1] != END:
            return None
        ids, tail = list(ids), self.close("response") + self.close("message") + [END]
        if ids[-len(tail):] != tail:
            return None
        ids = ids[:-len(tail)]
        if thinking:
            mark = self.close("think") + self.open("response")
            starts = [i for i in range(len(ids)) if ids[i:i + len(mark)] == mark]
            if not starts:
                return None
            ids = ids[starts[0] + len(mark):]
        return None if any(i >= BASE for i in ids) else self.decode(ids)

    def prompt(self, messages, effort):
        """effort: "off" (instruct mode) or "low"."""
        ids = self.effort(effort) if effort != "off" else []
        for m in messages:
            assert m["role"] in ("user", "system")
            ids = ids + self.message(m["role"], m["content"])
        return ids + self.assistant("" if effort != "off" else None, "")[0]


def train(words, size):
    """Merges by falling count (ties: the smaller pair of byte strings). words: {bytes: count}."""
    tokens = [bytes([i]) for i in range(256)]
    known = {t: i for i, t in enumerate(tokens)}
    digits = set(range(ord("0"), ord("9") + 1))
    seqs = [list(w) for w in words]
    counts = list(words.values())
    pairs, where = collections.Counter(), collections.defaultdict(set)
    for n, s in enumerate(seqs):
        for p in zip(s, s[1:]):
            if not digits & set(p):
                pairs[p] += counts[n]
                where[p].add(n)
    entry = lambda p: (-pairs[p], tokens[p[0]], tokens[p[1]], p)
    heap = [entry(p) for p in pairs]
    heapq.heapify(heap)
    while len(tokens) < size:
        item = heapq.heappop(heap)
        pair = item[3]
        if -item[0] != pairs[pair] or item[0] == 0:
            if pairs[pair] > 0:
                heapq.heappush(heap, entry(pair))
            continue
        joined = tokens[pair[0]] + tokens[pair[1]]
        new = known.setdefault(joined, len(tokens))       # two pairs may spell the same token
        if new == len(tokens):
            tokens.append(joined)
        changed = set()
        for n in where.pop(pair):
            s, c = seqs[n], counts[n]
            for p in zip(s, s[1:]):
                if not digits & set(p):
                    pairs[p] -= c
                    where[p].discard(n)
            out, i = [], 0
            while i < len(s):
                if i + 1 < len(s) and (s[i], s[i + 1]) == pair:
                    out.append(new)
                    i += 2
                else:
                    out.append(s[i])
                    i += 1
            seqs[n] = out
            for p in zip(out, out[1:]):
                if not digits & set(p):
                    pairs[p] += c
                    where[p].add(n)
                    changed.add(p)
        for p in changed:
            heapq.heappush(heap, entry(p))
    return tokens


def main():
    build = sys.argv[1]
    words = collections.Counter()
    for path in sorted(glob.glob(f"{build}/text/*.txt")):
        for m in SPLIT.finditer(open(path, encoding="utf-8").read()):
            words[m.group().encode()] += 1
    # the words of the chat format and of the exercises, weighted so that each becomes a token or two
    import exercises
    rng = exercises.generator(0)
    for text in exercises.vocabulary_texts(rng):
        for m in SPLIT.finditer(text):
            words[m.group().encode()] += 30
    tokens = train(words, BASE)
    os.makedirs(build, exist_ok=True)
    with open(f"{build}/tiktoken.model", "w") as f:
        f.writelines(f"{base64.b64encode(t).decode()} {rank}\n" for rank, t in enumerate(tokens))
    print(f"{len(tokens)} ranks from {len(words):,} distinct pieces")


if __name__ == "__main__":
    main()
