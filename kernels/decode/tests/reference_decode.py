"""References, tensors and assertions that the tests of decode share."""

from pathlib import Path

import torch
import torch.nn.functional as F
from testing import DEVICE, load

PROJECT = Path(__file__).resolve().parents[1]
ACTIVATIONS = {"silu": 1, "gelu": 2, "gelu_tanh": 3}  # with their numbers in the ops
# One input, less and more than a vector, not a multiple of one, and those of models.
WIDTHS = [1, 7, 8, 100, 1000] + ([4096, 14336] if DEVICE == "cuda" else [])


kernel = load(PROJECT)
ops = kernel._ops.ops


def eager_linear(x, weight, bias=None, residual=None):
    """Return the models' formula; with float64 inputs this is the reference."""
    out = F.linear(x, weight, bias)
    return out if residual is None else out + residual


def eager_gated(x, gate_weight, up_weight, gate_bias=None, up_bias=None, activation="silu"):
    """Return the same of an MLP's gate and projection."""
    gate = F.linear(x, gate_weight, gate_bias)
    gate = (
        F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh" if "tanh" in activation else "none")
    )
    return gate * F.linear(x, up_weight, up_bias)


def eager_attention(query, key, value, mask=None, scale=None):
    """Return attention, in the order of the kernel's result."""
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=True)
    return out.transpose(1, 2)


def eager_norm(x, weight, eps, offset=0.0, rounding="last"):
    """Return rows as models normalize them."""
    wide = x if x.dtype == torch.float64 else x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if rounding == "before_weight":
        wide = wide.to(x.dtype)
    return (wide * (weight.to(wide.dtype) + offset)).to(x.dtype)


def eager_rotary(x, weight, cos, sin, eps, offset=0.0, rounding="last"):
    """Return a head as models normalize and rotate it."""
    if weight is not None:
        x = eager_norm(x, weight, eps, offset, rounding)
    a, b = x.chunk(2, -1)
    return x * cos[:, None, None] + torch.cat((-b, a), -1) * sin[:, None, None]
