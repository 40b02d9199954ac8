"""Accuracy by kind, held-out loss and continuations of an exported model, in f32 with the exported weights.

    python evaluate.py MODEL_DIR BUILD_DIR        (BUILD_DIR/heldout.npz comes from data.py)

Generation is greedy and recomputes the whole sequence for every token: slow, short, and free of caches.
"""
import collections
import json
import os
import sys

import numpy as np
import torch

import checkpoint
import exercises
import k3
import tokenizer as tk

HERE = os.path.dirname(os.path.abspath(__file__))
SLICE = 1 << 15         # tokens of one forward pass


@torch.no_grad()
def generate(w, c, prompts, max_new, dtype=torch.float32):
    """Greedy continuations (lists of new ids, the stop id included) of prompts, all advanced together."""
    device = w["lm_head.weight"].device
    seqs, done = [list(p) for p in prompts], [False] * len(prompts)
    for _ in range(max_new):
        live = [i for i in range(len(seqs)) if not done[i]]
        if not live:
            break
        width = -(-max(len(seqs[i]) for i in live) // k3.CHUNK) * k3.CHUNK
        per = max(1, SLICE // width)
        for at in range(0, len(live), per):
            rows = live[at:at + per]
            ids = torch.full((len(rows), width), tk.PAD)
            for r, i in enumerate(rows):
                ids[r, :len(seqs[i])] = torch.tensor(seqs[i])
            ids = ids.to(device)
            h, _ = k3.hidden_states(w, c, ids, torch.zeros_like(ids), dtype, quantised=True)
            last = torch.tensor([len(seqs[i]) - 1 for i in rows], device=device)
            new = k3.logits(w, h[torch.arange(len(rows), device=device), last], dtype).argmax(-1).tolist()
            for i, t in zip(rows, new):
                seqs[i].append(t)
                done[i] = t in (tk.END, tk.EOS)
    return [s[len(p):] for s, p in zip(seqs, prompts)]


def correct(item, response):
    if response is None:
        return False
    response = response.strip()
    if item["match"] == "exact":
        return response == item["expected"]
    if item["match"] == "last":
        response = response.rpartition("\n")[2]
    return response.startswith(item["expected"])


def accuracy(w, c, tok, items, dtype=torch.float32):
    """{(kind, effort): (right, asked)}; an answer that does not stop by itself is wrong."""
    groups = collections.defaultdict(list)
    for item in items:
        groups[item["kind"], item["effort"]].append(item)
    table, wrong = {}, []
    for (kind, effort), group in sorted(groups.items()):
        prompts = [tok.prompt(i["messages"], effort) for i in group]
        new = generate(w, c, prompts, 160 if kind == "ledger" else 64, dtype)
        responses = [tok.response(ids, effort != "off") for ids in new]
        ok = [correct(i, r) for i, r in zip(group, responses)]
        table[kind, effort] = (sum(ok), len(ok))
        if kind == "ledger":
            yes = [o for i, o in zip(group, ok) if i["expected"].startswith("Yes")]
            no = [o for i, o in zip(group, ok) if i["expected"].startswith("No")]
            table[kind + " (balanced, %)", effort] = (50 * (sum(yes) / len(yes) + sum(no) / len(no)), 100)
        wrong += [(kind, effort, i["messages"][0]["content"], i["expected"], r, tok.decode(n))
                  for i, r, n, o in zip(group, responses, new, ok) if not o]
    return table, wrong


def other_mode(items):
    """The same questions in the mode that eval.jsonl does not use. A ledger with thinking off ends with its verdict,
    so there the last line of the response is compared."""
    return [{**i, "effort": "off" if i["effort"] == "low" else "low",
             "match": "last" if i["kind"] == "ledger" else i["match"]} for i in items]


def loss(w, c, docs, counted=None, dtype=torch.float32):
    """Mean negative log-likelihood of every token after the first of each document, each document on its own;
    counted, where given, says which tokens count."""
    device, total, count = w["lm_head.weight"].device, 0.0, 0
    with torch.no_grad():
        for n, d in enumerate(docs):
            ids = torch.tensor([d], device=device)
            h, _ = k3.hidden_states(w, c, ids, torch.zeros_like(ids), dtype, quantised=True)
            p = torch.log_softmax(k3.logits(w, h[0, :-1], dtype).double(), -1)
            use = torch.ones(len(d) - 1) if counted is None else torch.tensor(counted[n][1:]).double()
            total -= (p.gather(1, ids[0, 1:, None])[:, 0].cpu() * use).sum().item()
            count += use.sum().item()
    return total / count


def report(model_dir, build, device):
    w, c = checkpoint.load(model_dir)
    w = {k: x.to(device) for k, x in w.items()}
    tok = tk.Tokenizer(f"{model_dir}/tiktoken.model")
    items = [json.loads(line) for line in open(f"{HERE}/eval.jsonl", encoding="utf-8")]
    held = np.load(f"{build}/heldout.npz")
    for name in (n for n in sorted(held.files) if not n.endswith("_spoken")):
        counted = held[name + "_spoken"] if name + "_spoken" in held.files else None
        value = loss(w, c, held[name].tolist(), counted)
        print(f"held-out loss, {name}: {value:.4f} nats a token ({held[name].size} tokens)", flush=True)
    for mode in (items, other_mode(items)):
        table, wrong = accuracy(w, c, tok, mode)
        for (kind, effort), (right, asked) in table.items():
            print(f"{kind}, {effort}: {right:g} of {asked}", flush=True)
        for kind, effort, question, expected, response, text in wrong[:12]:
            print("  wrong:", json.dumps([kind, effort, question, expected, response, text]))
    openings = open(f"{HERE}/openings.txt", encoding="utf-8").read().splitlines()
    for opening, new in zip(openings, generate(w, c, [tok.encode(o) for o in openings], 60)):
        print(f"> {opening}{tok.decode(new)}\n", flush=True)


if __name__ == "__main__":
    report(sys.argv[1], sys.argv[2], "cuda" if torch.cuda.is_available() else "cpu")
