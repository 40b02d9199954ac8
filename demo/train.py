"""Train the demo model.

    python train.py BUILD_DIR OUT_DIR --minutes 7.3 --compile     on a GPU
    python train.py BUILD_DIR OUT_DIR --minutes 2 --toy      a small one on the CPU, to try the whole path

The schedule follows the clock: the learning rate warms up over the first steps, holds, and falls to zero when the
minutes are spent. On a GPU a whole step (forward, backward, update) is captured once as a CUDA graph and replayed.
"""
import argparse
import math
import time

import torch
import torch.nn.functional as F

import checkpoint
import data
import k3

WARMUP = 200                # steps
HOLD = 0.35                 # share of the time at the full rate, then a straight line to zero
MUON_LR, ADAM_LR = 5e-3, 3e-3
MUON_DECAY = 0.05
BIAS_STEP = 2e-3            # of the load-balancing bias
NOT_MUON = ("embed_tokens.weight", "lm_head.weight", "gate.weight", "res_proj.weight", "b_proj.weight")


def muon_names(w):
    return [n for n, x in w.items()
            if x.dim() >= 2 and "conv1d" not in n and (n.endswith("f_b_proj.weight") or not n.endswith(NOT_MUON))]


def orthogonalise(x):
    """Newton-Schulz iteration towards the nearest semi-orthogonal matrix, batched, in bf16."""
    tall = x.shape[-2] > x.shape[-1]
    x = x.to(torch.bfloat16)
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        s = x @ x.mT
        x = 3.4445 * x + (-4.7750 * s + 2.0315 * (s @ s)) @ x
    return (x.mT if tall else x).float()


class Muon:
    """Momentum, orthogonalised; the update has the root mean square that AdamW's has (0.2)."""

    def __init__(self, tensors, lr):
        self.lr, self.groups = lr, {}
        for x in tensors:
            self.groups.setdefault(tuple(x.shape[-2:]), []).append(x)
        self.momentum = {s: torch.cat([torch.zeros_like(x).view(-1, *s) for x in xs]) for s, xs in self.groups.items()}

    @torch.no_grad()
    def step(self):
        for shape, xs in self.groups.items():
            grad, m = torch.cat([x.grad.view(-1, *shape) for x in xs]), self.momentum[shape]
            m.lerp_(grad, 0.05)
            update = orthogonalise(grad.lerp(m, 0.95)) * (0.2 * math.sqrt(max(shape)))
            for x, u in zip(xs, update.split([x.numel() // (shape[0] * shape[1]) for x in xs])):
                x.mul_(1 - self.lr * MUON_DECAY).sub_(self.lr * u.view_as(x))


class Trainer:
    def __init__(self, w, c, device, dtype):
        self.w, self.c, self.device, self.dtype = w, c, device, dtype
        self.biases = {int(n.split(".")[2]): x for n, x in w.items() if n.endswith("e_score_correction_bias")}
        bias_ids = {id(x) for x in self.biases.values()}
        for x in w.values():
            x.requires_grad_(id(x) not in bias_ids)
        muon = muon_names(w)
        scalar = lambda v: torch.tensor(v, device=device)
        self.muon_lr, self.adam_lr, self.bias_step = scalar(0.0), scalar(0.0), scalar(0.0)
        self.muon = Muon([w[n] for n in muon], self.muon_lr)
        rest = [x for n, x in w.items() if n not in set(muon) and id(x) not in bias_ids]
        cuda = device == "cuda"
        self.adam = torch.optim.AdamW(rest, lr=self.adam_lr if cuda else 0.0, betas=(0.9, 0.95), weight_decay=0.0,
                                      fused=cuda, capturable=cuda)
        self.trained = [x for x in w.values() if x.requires_grad]

    def set_rate(self, factor):
        self.muon_lr.fill_(MUON_LR * factor)
        self.adam_lr.fill_(ADAM_LR * factor)
        self.bias_step.fill_(BIAS_STEP * factor)
        if self.device != "cuda":
            for g in self.adam.param_groups:
                g["lr"] = ADAM_LR * factor

    def step(self, ids, seg, weight):
        """Returns [mean loss, most loaded expert over the mean] as one tensor."""
        h, run = k3.hidden_states(self.w, self.c, ids[:, :-1], seg[:, :-1], self.dtype)
        out = F.linear(h.to(self.dtype), self.w["lm_head.weight"].to(torch.bfloat16).to(self.dtype)).float()
        nll = F.cross_entropy(out.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        use = weight[:, 1:].flatten() * (seg[:, 1:] == seg[:, :-1]).flatten()
        loss = (nll * use).sum() / use.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.muon.step()
        self.adam.step()
        worst = []
        with torch.no_grad():
            for layer, load in run.load.items():
                self.biases[layer].add_(self.bias_step * torch.sign(load.mean() - load))
                worst.append(load.max() / load.mean())
        return torch.stack([loss.detach(), torch.stack(worst).mean()])

    def clear(self):
        for x in self.trained:
            x.grad = None


def compile_pieces():
    for name in ("rms", "situ", "mix", "conv_silu", "l2norm"):
        setattr(k3, name, torch.compile(getattr(k3, name), dynamic=False))


def graph(trainer, example):
    """The step as a CUDA graph over fixed input tensors: returns run(batch) -> result tensor."""
    static = [x.to("cuda") for x in example]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):                      # at rate zero: compiles, tunes, allocates
            trainer.clear()
            trainer.step(*static)
    torch.cuda.current_stream().wait_stream(side)
    trainer.clear()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        result = trainer.step(*static)

    def run(batch):
        for a, b in zip(static, batch):
            a.copy_(b, non_blocking=True)
        captured.replay()
        return result
    return run


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("build")
    ap.add_argument("out")
    ap.add_argument("--minutes", type=float, default=7.3)
    ap.add_argument("--rows", type=int, default=64)
    ap.add_argument("--length", type=int, default=512)
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--workers", type=int, default=8)
    ap.add_argument("--max-steps", type=int, default=10 ** 9)
    ap.add_argument("--toy", action="store_true")
    ap.add_argument("--compile", action="store_true", help="torch.compile for the elementwise pieces")
    ap.add_argument("--no-graph", action="store_true")
    a = ap.parse_args()
    start = time.time()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(a.seed)
    c = k3.TOY if a.toy else k3.Config()
    w = {n: x.to(device) for n, x in k3.init(c, a.seed).items()}
    trainer = Trainer(w, c, device, torch.bfloat16 if device == "cuda" else torch.float32)
    batches = data.loader(a.build, a.rows, a.length, a.seed, a.workers)
    if a.compile:
        compile_pieces()
    if device == "cuda" and not a.no_graph:
        run = graph(trainer, next(batches))
    else:
        def run(batch):
            trainer.clear()
            return trainer.step(*(x.to(device) for x in batch))
    print(f"ready after {time.time() - start:.0f} s", flush=True)
    begin, step, shown, mark = time.time(), 0, 0.0, (time.time(), 0)
    while True:
        done = max((time.time() - begin) / (a.minutes * 60), step / a.max_steps)
        if done >= 1.0:
            break
        trainer.set_rate(min(1.0, (step + 1) / WARMUP, (1.0 - done) / (1.0 - HOLD)))
        result = run(next(batches))
        step += 1
        if step % 25 == 0 and time.time() - shown > 5:
            loss, worst = result.tolist()
            now = time.time()
            rate = (step - mark[1]) * a.rows * a.length / (now - mark[0])
            mark, shown = (now, step), now
            print(f"{now - begin:6.1f} s  step {step:5}  loss {loss:.4f}  fullest expert {worst:.2f} x mean  "
                  f"{rate / 1e3:.0f} k tokens/s", flush=True)
            if not math.isfinite(loss):
                raise SystemExit("loss is not finite")
    if device == "cuda":
        torch.cuda.synchronize()
    size, params = checkpoint.save(w, c, f"{a.out}/model", f"{a.build}/tiktoken.model")
    print(f"{step} steps, {step * a.rows * a.length / 1e6:.1f} M tokens, {time.time() - begin:.0f} s, "
          f"{params:,} parameters, {size:,} bytes", flush=True)


if __name__ == "__main__":
    main()
