"""Numbers for the tests of an engine: heldout.json and reference_logits.{npy,json}.

    python expected.py MODEL_DIR BUILD_DIR            writes heldout.json and compares the reference logits
    python expected.py MODEL_DIR BUILD_DIR LOGITS     also takes LOGITS (npy) as the reference logits

heldout.json holds documents and the mean loss that this training code gives on the exported weights in f32. The
reference logits come from another program, a plain token-by-token implementation in float64; this script only says
how far the training code is from them.
"""
import json
import os
import sys

import numpy as np
import torch

import checkpoint
import evaluate
import k3
import tokenizer as tk

HERE = os.path.dirname(os.path.abspath(__file__))
DOC_TOKENS = 64
PROMPT = [{"role": "user", "content": "What is 27 + 45?"}]


def main():
    model, build = sys.argv[1:3]
    w, c = checkpoint.load(model)
    tok = tk.Tokenizer(f"{model}/tiktoken.model")
    held = np.load(f"{build}/heldout.npz")
    docs = [held[name][0, :DOC_TOKENS].tolist() for name in sorted(held.files) if not name.startswith("exercises")]
    instruct = [row.tolist() for row in held["exercises"] if row[:8].tolist() != tok.effort("low")[:8]]
    docs += instruct[:2]
    value = evaluate.loss(w, c, docs)
    with open(f"{HERE}/heldout.json", "w") as f:
        json.dump({"about": "mean negative log-likelihood, in nats, of every token after the first of each document; "
                            "each document starts from an empty state", "loss": value, "ids": docs}, f)
    print(f"held-out loss {value:.6f} over {sum(len(d) - 1 for d in docs)} predictions")
    ids = tok.prompt(PROMPT, "off")
    json.dump({"about": "float64 logits after each of these ids, from an empty state, rounded to f32", "ids": ids},
              open(f"{HERE}/reference_logits.json", "w"))
    if len(sys.argv) > 3:
        np.save(f"{HERE}/reference_logits.npy", np.load(sys.argv[3]).astype(np.float32))
    with torch.no_grad():
        row = torch.tensor([ids])
        h, _ = k3.hidden_states(w, c, row, torch.zeros_like(row), quantised=True)
        ours = k3.logits(w, h)[0].numpy()
    reference = np.load(f"{HERE}/reference_logits.npy")
    print(f"largest difference from the reference logits {np.abs(ours - reference).max():.2e} "
          f"on values up to {np.abs(reference).max():.1f}")


if __name__ == "__main__":
    main()
