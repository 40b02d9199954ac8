"""Token streams for training, and the held-out documents.

    python data.py BUILD_DIR      encodes BUILD_DIR/text into BUILD_DIR/train.npz and BUILD_DIR/heldout.npz

A row of training is either 512 tokens of running text or conversations packed one after the other, each its own
segment.
"""
import glob
import os
import re
import sys

import numpy as np
import torch

import exercises
import tokenizer as tk

HELD_OUT_DOCS, HELD_OUT_TOKENS = 8, 256     # of each source; every token near them is kept out of training
TEXT_SHARE = 0.35                           # of rows
HELD_OUT_SEED = 77


def encode(build):
    tok = tk.Tokenizer(f"{build}/tiktoken.model")
    train, held = {}, {}
    for path in sorted(glob.glob(f"{build}/text/*.txt")):
        name = os.path.basename(path)[:-4]
        paragraphs = re.split(r"(?<=\n\n)", open(path, encoding="utf-8").read())
        # eight stretches at even distances, cut out whole
        starts = [int((i + 0.5) * len(paragraphs) / HELD_OUT_DOCS) for i in range(HELD_OUT_DOCS)]
        docs, out = [], set()
        for s in starts:
            ids, n = [], s
            while len(ids) < HELD_OUT_TOKENS and n < len(paragraphs):
                ids += tok.encode(paragraphs[n])
                n += 1
            if len(ids) >= HELD_OUT_TOKENS:
                out.update(range(s, n))
                docs.append(ids[:HELD_OUT_TOKENS])
        train[name] = np.array(tok.encode("".join(p for i, p in enumerate(paragraphs) if i not in out)), np.uint16)
        held[name] = np.array(docs, np.uint16)
        print(f"{name}: {len(train[name]):,} tokens, {len(docs)} held-out documents")
    rng, rows, spoken = exercises.generator(HELD_OUT_SEED), [], []
    while len(rows) < 2 * HELD_OUT_DOCS:
        ids, weights = exercises.conversation(rng, tok)
        if len(ids) >= 96:
            rows.append(ids[:96])
            spoken.append([w == 1.0 for w in weights[:96]])
    held["exercises"], held["exercises_spoken"] = np.array(rows, np.uint16), np.array(spoken)
    np.savez_compressed(f"{build}/train.npz", **train)
    np.savez_compressed(f"{build}/heldout.npz", **held)


class Batches(torch.utils.data.IterableDataset):
    """Endless (ids, seg, weight), each [rows, length + 1]; weight is that of predicting the token, 0 at a start."""

    def __init__(self, build, rows, length, seed):
        self.build, self.rows, self.length, self.seed = build, rows, length, seed

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        worker = info.id if info else 0
        rng = exercises.generator(self.seed * 1000 + worker)
        tok = tk.Tokenizer(f"{self.build}/tiktoken.model")
        texts = list(np.load(f"{self.build}/train.npz").values())
        shares = [len(t) ** 0.7 for t in texts]
        width = self.length + 1
        while True:
            ids = np.full((self.rows, width), tk.PAD, np.int64)
            seg, weight = np.zeros((self.rows, width), np.int64), np.zeros((self.rows, width), np.float32)
            for r in range(self.rows):
                if rng.random() < TEXT_SHARE:
                    text = rng.choices(texts, shares)[0]
                    at = rng.randrange(len(text) - width)
                    ids[r], weight[r, 1:] = text[at:at + width], 1.0
                    continue
                at, n = 0, 0
                while at < width:
                    doc, w = exercises.conversation(rng, tok)
                    end = min(width, at + len(doc))
                    ids[r, at:end], weight[r, at:end], seg[r, at:end] = doc[:end - at], w[:end - at], n
                    weight[r, at] = 0.0
                    at, n = end, n + 1
            yield torch.from_numpy(ids), torch.from_numpy(seg), torch.from_numpy(weight)


def loader(build, rows, length, seed, workers):
    return iter(torch.utils.data.DataLoader(Batches(build, rows, length, seed), batch_size=None, num_workers=workers,
                                            pin_memory=torch.cuda.is_available(),
                                            prefetch_factor=4 if workers else None))


if __name__ == "__main__":
    encode(sys.argv[1])
