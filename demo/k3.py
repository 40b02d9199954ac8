"""The Kimi K3 text model in PyTorch, for training: chunked KDA, packed documents, dropless experts.

Weights live in a flat dict whose keys are the checkpoint's tensor names without "language_model."; the experts of a
layer are stacked: "model.layers.3.block_sparse_moe.experts.w1" is [experts, out, in]. All masters are f32. The forward
pass sees every trunk weight rounded to bf16 and every expert weight rounded to MXFP4, both straight-through, so what
is exported is what was trained.

`forward(w, c, ids, seg, dtype)`: ids and seg are [B, T]; tokens of one row attend to each other only where seg agrees
(seg never falls along a row). dtype is the type of activations: bf16 to train, f32 to evaluate.
"""
import dataclasses
import math

import torch
import torch.nn.functional as F

from mxfp4 import fake_quantise

L2_EPS = 1e-6           # added to the sum of squares of a KDA query or key
LATENT_EPS = 1e-6       # of q_a_layernorm and kv_a_layernorm
DECAY_BOUND = -5.0      # gate_lower_bound
CHUNK = 32              # of KDA: decays of half a chunk, e^(5 * 16), stay far inside f32's range


@dataclasses.dataclass(frozen=True)
class Config:
    vocab: int = 4352
    hidden: int = 192
    layers: int = 13
    full_attn: tuple = (4, 8, 12, 13)       # 1-based
    block: int = 5
    kda_heads: int = 3
    kda_dim: int = 64
    conv: int = 4
    heads: int = 3
    nope: int = 64
    rope: int = 32
    v_dim: int = 64
    q_lora: int = 64
    kv_lora: int = 64
    inter: int = 512
    experts: int = 64
    top_k: int = 4
    latent: int = 128
    moe_inter: int = 64
    shared: int = 2
    situ_beta: float = 4.0
    situ_linear_beta: float = 25.0
    eps: float = 1e-5

    def is_kda(self, layer):
        return layer + 1 not in self.full_attn

    def is_dense(self, layer):
        return layer < 1


TOY = Config(hidden=64, layers=9, full_attn=(4, 8, 9), block=4, kda_heads=2, kda_dim=32, heads=2, nope=32, rope=16,
             v_dim=32, q_lora=32, kv_lora=32, inter=96, experts=16, top_k=3, latent=32, moe_inter=32)

# stored as F32 in the checkpoint; all else is BF16 or MXFP4
F32_SUFFIXES = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")


def init(c, seed):
    g = torch.Generator().manual_seed(seed)
    w = {}

    def linear(name, out, inp, gain=1.0):
        w[name] = torch.randn(out, inp, generator=g) * (gain / math.sqrt(inp))

    ones = lambda name, n: w.__setitem__(name, torch.ones(n))
    w["model.embed_tokens.weight"] = torch.randn(c.vocab, c.hidden, generator=g) * 0.5
    linear("lm_head.weight", c.vocab, c.hidden, 0.3)
    for layer in range(c.layers):
        p = f"model.layers.{layer}."
        for n in ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm"):
            ones(p + n + ".weight", c.hidden)
        for n in ("self_attention_res_proj", "mlp_res_proj"):
            w[p + n + ".weight"] = torch.zeros(1, c.hidden)
        a = p + "self_attn."
        if c.is_kda(layer):
            wide = c.kda_heads * c.kda_dim
            for s in "qkvg":
                linear(f"{a}{s}_proj.weight", wide, c.hidden)
            for s in "qkv":
                taps = torch.randn(wide, 1, c.conv, generator=g) * 0.2
                taps[:, :, -1] += 0.8
                w[f"{a}{s}_conv1d.weight"] = taps
            linear(a + "o_proj.weight", c.hidden, wide, 0.5)
            linear(a + "f_a_proj.weight", c.kda_dim, c.hidden)
            linear(a + "f_b_proj.weight", wide, c.kda_dim)
            linear(a + "b_proj.weight", c.kda_heads, c.hidden)
            w[a + "A_log"] = torch.zeros(c.kda_heads)
            w[a + "dt_bias"] = torch.rand(wide, generator=g) * 7 - 8     # decay a token from e^-1.3 to e^-0.002
            ones(a + "o_norm.weight", c.kda_dim)
        else:
            linear(a + "q_a_proj.weight", c.q_lora, c.hidden)
            ones(a + "q_a_layernorm.weight", c.q_lora)
            linear(a + "q_b_proj.weight", c.heads * (c.nope + c.rope), c.q_lora)
            linear(a + "kv_a_proj_with_mqa.weight", c.kv_lora + c.rope, c.hidden)
            ones(a + "kv_a_layernorm.weight", c.kv_lora)
            linear(a + "kv_b_proj.weight", c.heads * (c.nope + c.v_dim), c.kv_lora)
            linear(a + "g_proj.weight", c.heads * c.v_dim, c.hidden)
            linear(a + "o_proj.weight", c.hidden, c.heads * c.v_dim, 0.5)
        if c.is_dense(layer):
            linear(p + "mlp.gate_proj.weight", c.inter, c.hidden)
            linear(p + "mlp.up_proj.weight", c.inter, c.hidden)
            linear(p + "mlp.down_proj.weight", c.hidden, c.inter, 0.5)
        else:
            m = p + "block_sparse_moe."
            linear(m + "gate.weight", c.experts, c.hidden, 0.5)
            w[m + "gate.e_score_correction_bias"] = torch.zeros(c.experts)
            linear(m + "routed_expert_down_proj.weight", c.latent, c.hidden)
            ones(m + "routed_expert_norm.weight", c.latent)
            linear(m + "routed_expert_up_proj.weight", c.hidden, c.latent, 0.5)
            wide = c.shared * c.moe_inter
            linear(m + "shared_experts.gate_proj.weight", wide, c.hidden)
            linear(m + "shared_experts.up_proj.weight", wide, c.hidden)
            linear(m + "shared_experts.down_proj.weight", c.hidden, wide, 0.5)
            for n, out, inp in (("w1", c.moe_inter, c.latent), ("w3", c.moe_inter, c.latent),
                                ("w2", c.latent, c.moe_inter)):
                w[f"{m}experts.{n}"] = torch.randn(c.experts, out, inp, generator=g) / math.sqrt(inp)
    ones("model.norm.weight", c.hidden)
    ones("model.output_attn_res_norm.weight", c.hidden)
    w["model.output_attn_res_proj.weight"] = torch.zeros(1, c.hidden)
    return w


# ------------------------------------------------------------------------------------------------ elementwise pieces
def rms(x, weight, eps):
    """f32 in, f32 out."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def situ(gate, up, beta, linear_beta):
    gate, up = gate.float(), up.float()
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * (linear_beta * torch.tanh(up / linear_beta))


def mix(sources, direction, eps):
    """Attention residual over a list of [B, T, d]: keys are normalised, values are not."""
    scores = torch.stack([(s * direction).sum(-1) * torch.rsqrt(s.square().mean(-1) + eps) for s in sources], -1)
    prob = torch.softmax(scores, -1)
    return sum(prob[..., i, None] * s for i, s in enumerate(sources))


def conv_silu(u, taps, same):
    """Causal depthwise convolution and SiLU. u [B, T, c], taps [c, K]; same[j] [B, T]: is token t-j in the segment?"""
    u = u.float()
    width = taps.shape[1]
    y = u * taps[:, -1]
    for j in range(1, width):
        y = y + F.pad(u, (0, 0, j, 0))[:, :-j] * same[j - 1][..., None] * taps[:, width - 1 - j]
    return F.silu(y)


def l2norm(x):
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


# ------------------------------------------------------------------------------------------------ KDA, chunked
class _UnitLowerInverse(torch.autograd.Function):
    """(I + A)^-1 for strictly lower A [..., n, n], n at most 32.

    A = D + E with D the diagonal blocks of 8: (I + D)^-1 = (I - D)(I + D^2)(I + D^4) since D^8 = 0, and with
    M = (I + D)^-1 E, (I + A)^-1 = (I - M)(I + M^2)(I + D)^-1 since M^4 = 0. Short products keep f32 exact enough."""

    @staticmethod
    def forward(ctx, a):
        n = a.shape[-1]
        eye = torch.eye(n, dtype=a.dtype, device=a.device)
        block = torch.arange(n, device=a.device) // 8
        inside = block[:, None] == block
        d = a.masked_fill(~inside, 0.0)
        d2 = d @ d
        inv8 = (eye - d) @ (eye + d2) @ (eye + d2 @ d2)
        m = inv8 @ a.masked_fill(inside, 0.0)
        inv = (eye - m) @ (eye + m @ m) @ inv8
        ctx.save_for_backward(inv)
        return inv

    @staticmethod
    def backward(ctx, grad):
        (inv,) = ctx.saved_tensors
        t = inv.transpose(-1, -2)
        return -(t @ grad @ t)


def kda(q, k, v, g, beta, seg):
    """Gated delta rule. q k v g [B, T, H, D] f32 (q scaled, g the log decay), beta [B, T, H], seg [B, T] -> like v.

    Within a chunk, exponentials are taken relative to its middle, so both factors of exp(G_i - G_j) stay finite;
    entries with j > i may overflow and are masked. A change of segment drops the state."""
    b, t, h, d = q.shape
    n = t // CHUNK
    fold = lambda x: x.view(b, n, CHUNK, h, -1).permute(0, 3, 1, 2, 4)              # [B, H, N, C, D]
    q, k, v, g, beta = fold(q), fold(k), fold(v), fold(g), fold(beta)
    seg = seg.view(b, 1, n, CHUNK)
    last = seg[..., -1]
    before = F.pad(last[..., :-1], (1, 0), value=-1)                                # segment of the carried state
    carried = (seg == before[..., None]).float()[..., None]
    kept = (seg == last[..., None]).float()[..., None]
    total = g.cumsum(-2)
    end, middle = total[..., -1:, :], total[..., CHUNK // 2:CHUNK // 2 + 1, :]
    k_early, k_late = k * torch.exp(middle - total), k * torch.exp(total - middle)
    same = seg[..., :, None] == seg[..., None, :]
    order = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device)
    attend = (k_late @ k_early.transpose(-1, -2)).masked_fill(~(same & order.tril(-1)), 0.0)
    read = ((q * torch.exp(total - middle)) @ k_early.transpose(-1, -2)).masked_fill(~(same & order.tril()), 0.0)
    inverse = _UnitLowerInverse.apply(beta * attend)
    decay = torch.exp(total)
    wk = inverse @ (beta * carried * decay * k)
    u = inverse @ (beta * v)
    q_state = q * decay * carried
    k_state = (k * torch.exp(end - total) * kept).transpose(-1, -2)
    s_decay = (torch.exp(end) * (before == last).float()[..., None, None]).transpose(-1, -2)     # [B, H, N, D, 1]
    state, out = q.new_zeros(b, h, d, v.shape[-1]), []
    # unbind, not an index a chunk: the gradient of an index is as large as the whole tensor
    for u, wk, q, read, k, keep in zip(*(x.unbind(2) for x in (u, wk, q_state, read, k_state, s_decay))):
        new = u - wk @ state
        out.append(q @ state + read @ new)
        state = keep * state + k @ new
    return torch.stack(out, 2).permute(0, 2, 3, 1, 4).reshape(b, t, h, -1)


# ------------------------------------------------------------------------------------------------ the model
class _Pass:
    """One forward pass: weights, configuration, activation type, and the load of each expert, by layer."""

    def __init__(self, w, c, dtype, quantised=False):
        self.w, self.c, self.dtype, self.quantised = w, c, dtype, quantised
        self.load = {}

    def vec(self, name):
        """A trunk weight as the checkpoint will hold it, in f32."""
        x = self.w[name]
        return x.float() if name.endswith(F32_SUFFIXES) else x.to(torch.bfloat16).float()

    def lin(self, x, name):
        return F.linear(x.to(self.dtype), self.w[name + ".weight"].to(torch.bfloat16).to(self.dtype))

    def glu(self, x, gate, up, down):
        c = self.c
        return self.lin(situ(self.lin(x, gate), self.lin(x, up), c.situ_beta, c.situ_linear_beta), down)

    def kda_layer(self, p, x, seg, same):
        c = self.c
        b, t, _ = x.shape
        heads = lambda y: y.view(b, t, c.kda_heads, c.kda_dim)
        q, k, v = (heads(conv_silu(self.lin(x, f"{p}{s}_proj"), self.w[f"{p}{s}_conv1d.weight"][:, 0], same))
                   for s in "qkv")
        q, k = l2norm(q) * c.kda_dim ** -0.5, l2norm(k)
        z = self.lin(self.lin(x, p + "f_a_proj"), p + "f_b_proj").float() + self.w[p + "dt_bias"]
        g = DECAY_BOUND * torch.sigmoid(torch.exp(self.w[p + "A_log"])[:, None] * heads(z))
        beta = torch.sigmoid(self.lin(x, p + "b_proj").float())
        o = rms(kda(q, k, v, g, beta, seg), self.vec(p + "o_norm.weight"), c.eps)
        o = o * torch.sigmoid(heads(self.lin(x, p + "g_proj")).float())
        return self.lin(o.reshape(b, t, -1), p + "o_proj")

    def mla_layer(self, p, x, allowed):
        c = self.c
        b, t, _ = x.shape
        cq = rms(self.lin(x, p + "q_a_proj").float(), self.vec(p + "q_a_layernorm.weight"), LATENT_EPS)
        q = self.lin(cq, p + "q_b_proj").view(b, t, c.heads, -1).transpose(1, 2)
        kv = self.lin(x, p + "kv_a_proj_with_mqa")
        latent = rms(kv[..., :c.kv_lora].float(), self.vec(p + "kv_a_layernorm.weight"), LATENT_EPS)
        shared = kv[..., c.kv_lora:].unsqueeze(1).expand(b, c.heads, t, c.rope)
        k, v = self.lin(latent, p + "kv_b_proj").view(b, t, c.heads, -1).transpose(1, 2).split([c.nope, c.v_dim], -1)
        k = torch.cat([k, shared], -1)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=(c.nope + c.rope) ** -0.5)
        o = o.transpose(1, 2).reshape(b, t, -1).float()
        return self.lin(o * torch.sigmoid(self.lin(x, p + "g_proj").float()), p + "o_proj")

    def expert_weight(self, name):
        x = self.w[name]
        return (x if self.quantised else fake_quantise(x)).to(self.dtype)

    def experts(self, p, z, ends):
        """z [T k, latent] sorted by expert; ends[e] is where expert e's rows end."""
        c = self.c
        w13 = torch.cat([self.expert_weight(p + "w1"), self.expert_weight(p + "w3")], 1)
        w2 = self.expert_weight(p + "w2")
        if z.is_cuda and self.dtype == torch.bfloat16:
            h = torch._grouped_mm(z, w13.transpose(-1, -2), offs=ends)
            h = situ(*h.chunk(2, -1), c.situ_beta, c.situ_linear_beta).to(self.dtype)
            return torch._grouped_mm(h, w2.transpose(-1, -2), offs=ends)
        out, start = [], 0
        for e, end in enumerate(ends.tolist()):
            h = F.linear(z[start:end], w13[e])
            out.append(F.linear(situ(*h.chunk(2, -1), c.situ_beta, c.situ_linear_beta).to(self.dtype), w2[e]))
            start = end
        return torch.cat(out)

    def moe(self, layer, p, x):
        c = self.c
        b, t, _ = x.shape
        flat = x.reshape(b * t, -1)
        score = torch.sigmoid(flat @ self.vec(p + "gate.weight").T)
        bias = self.w[p + "gate.e_score_correction_bias"]
        pick = (score.detach() + bias.detach()).topk(c.top_k, -1).indices
        weight = score.gather(1, pick)
        weight = weight / (weight.sum(-1, keepdim=True) + 1e-20)
        slot = pick.reshape(-1)
        ranked, order = slot.sort(stable=True)
        ends = torch.searchsorted(ranked, torch.arange(c.experts, device=x.device), right=True).to(torch.int32)
        self.load[layer] = torch.diff(ends, prepend=ends.new_zeros(1)).float()
        z = self.lin(flat, p + "routed_expert_down_proj")
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
        y = self.experts(p + "experts.", Dispatch.apply(z, order, back, c.top_k), ends)
        y = Permute.apply(y, back, order).view(b * t, c.top_k, -1)
        y = (y.float() * weight[..., None]).sum(1)
        y = self.lin(rms(y, self.vec(p + "routed_expert_norm.weight"), c.eps), p + "routed_expert_up_proj")
        s = p + "shared_experts."
        return y.view(b, t, -1) + self.glu(x, s + "gate_proj", s + "up_proj", s + "down_proj")

    def run(self, ids, seg):
        c = self.c
        b, t = ids.shape
        pad = -t % CHUNK
        if pad:
            ids, seg = F.pad(ids, (0, pad)), F.pad(seg, (0, pad), value=1 << 30)
        same = [(F.pad(seg, (j, 0), value=-1)[:, :-j] == seg).float() for j in range(1, c.conv)]
        causal = torch.ones(t + pad, t + pad, dtype=torch.bool, device=ids.device).tril()
        allowed = ((seg[:, None, :, None] == seg[:, None, None, :]) & causal)
        direction = lambda n: self.vec(n + "_norm.weight") * self.vec(n + "_proj.weight")[0]
        x, bank = F.embedding(ids, self.w["model.embed_tokens.weight"].to(torch.bfloat16)).float(), []
        for layer in range(c.layers):
            p = f"model.layers.{layer}."
            h = mix(bank + [x], direction(p + "self_attention_res"), c.eps) if bank else x
            h = rms(h, self.vec(p + "input_layernorm.weight"), c.eps)
            a = (self.kda_layer(p + "self_attn.", h, seg, same) if c.is_kda(layer)
                 else self.mla_layer(p + "self_attn.", h, allowed)).float()
            if layer % c.block == 0:
                bank.append(x)
                x = a
            else:
                x = x + a
            h = mix(bank + [x], direction(p + "mlp_res"), c.eps)
            h = rms(h, self.vec(p + "post_attention_layernorm.weight"), c.eps)
            x = x + (self.glu(h, p + "mlp.gate_proj", p + "mlp.up_proj", p + "mlp.down_proj") if c.is_dense(layer)
                     else self.moe(layer, p + "block_sparse_moe.", h)).float()
        x = mix(bank + [x], direction("model.output_attn_res"), c.eps)
        return rms(x, self.vec("model.norm.weight"), c.eps)[:, :t]


class Permute(torch.autograd.Function):
    """Rows in another order, with the gather in the backward pass that autograd would do by atomic adds."""

    @staticmethod
    def forward(ctx, x, index, inverse):
        ctx.save_for_backward(inverse)
        return x[index]

    @staticmethod
    def backward(ctx, grad):
        return grad[ctx.saved_tensors[0]], None, None


class Dispatch(torch.autograd.Function):
    """z [T, d] -> [T k, d] sorted by expert; the backward pass sums each token's k gradients in slot order."""

    @staticmethod
    def forward(ctx, z, order, back, top_k):
        ctx.save_for_backward(back)
        ctx.top_k = top_k
        return z[order // top_k]

    @staticmethod
    def backward(ctx, grad):
        (back,) = ctx.saved_tensors
        return grad[back].unflatten(0, (-1, ctx.top_k)).sum(1), None, None, None


def hidden_states(w, c, ids, seg, dtype=torch.float32, quantised=False):
    run = _Pass(w, c, dtype, quantised)
    return run.run(ids, seg), run


def logits(w, h, dtype=torch.float32):
    return F.linear(h.to(dtype), w["lm_head.weight"].to(torch.bfloat16).to(dtype)).float()
