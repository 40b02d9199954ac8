"""MXFP4 (OCP Microscaling Formats): E2M1 elements, one E8M0 scale for each 32 consecutive input columns.

The same rounding serves training (`fake_quantise`, straight-through) and export (`pack`), so that the packed bytes
are exactly the weights that the last training step used.
"""
import torch

GROUP = 32
LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# The scale is the smallest power of two that brings a group's largest magnitude to at most 7: values between 6 and 7
# are clipped to 6, which costs less than halving the resolution of the other 31.
TOP = 7.0


def _scaled(w):
    """w [..., out, in] -> (w / 2^e as [..., in/32, 32], e)."""
    groups = w.unflatten(-1, (-1, GROUP))
    top = groups.abs().amax(-1, keepdim=True).clamp_min(2.0 ** -100)
    # frexp: x = m 2^k with m in [0.5, 1), so 2^k is the smallest power of two above x, and x itself if x is one
    mantissa, exponent = torch.frexp(top / TOP)
    exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
    return groups * torch.exp2(-exponent.to(w.dtype)), exponent


def _round(x):
    """Nearest E2M1 magnitude, ties to the even code: steps are 0.5 below 2, 1 below 4, 2 up to 6."""
    a = x.abs().clamp_max(6.0)
    step = torch.where(a < 2.0, 0.5, torch.where(a < 4.0, 1.0, 2.0))
    return torch.copysign(torch.round(a / step) * step, x)


def quantise(w):
    scaled, exponent = _scaled(w)
    return (_round(scaled) * torch.exp2(exponent.to(w.dtype))).flatten(-2)


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w):
        return quantise(w)

    @staticmethod
    def backward(ctx, grad):
        return grad


def fake_quantise(w):
    return _Straight.apply(w)


def pack(w):
    """f32 [out, in] -> (u8 [out, in/2], even column in the low nibble; u8 [out, in/32], E8M0)."""
    scaled, exponent = _scaled(w)
    value = _round(scaled).flatten(-2)
    code = torch.bucketize(value.abs(), torch.tensor(LEVELS)).to(torch.uint8)
    code |= (torch.signbit(value).to(torch.uint8) << 3)
    return code[..., 0::2] | (code[..., 1::2] << 4), (exponent.squeeze(-1) + 127).to(torch.uint8)


def unpack(packed, scale):
    table = torch.tensor(LEVELS + tuple(-x for x in LEVELS))
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
    return (table[codes.long()].unflatten(-1, (-1, GROUP)) * torch.exp2(scale.float() - 127)[..., None]).flatten(-2)
