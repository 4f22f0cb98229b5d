"""Workloads of rotary embeddings: `kernel-builder benchmark DIR` or `kernels benchmark DIR`."""

import math
import sys
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent))
from workload import Workload

# Batch, frames, height, width, heads, elements of a head: small and large video models.
VIDEOS = [(1, 7, 16, 24, 32, 64), (1, 13, 30, 44, 16, 128), (1, 21, 45, 80, 12, 128), (2, 7, 22, 40, 24, 128)]
# Unusual sizes, and a single token.
OTHERS = [(1, 5, 17, 23, 20, 72), (1, 1, 1, 1, 24, 128)]
CPU = [(1, 2, 16, 24, 32, 64), (1, 1, 30, 44, 16, 128)]
SHAPES = {name: {"cuda": VIDEOS + OTHERS, "cpu": CPU} for name in ("forward", "backward")}


def tables(grid, dim, device):
    """Return the cosines and sines of Wan: [tokens, dim / 2], float64."""
    sixth = dim // 6
    points = torch.cartesian_prod(*(torch.arange(size, dtype=torch.float64, device=device) for size in grid))
    frequencies = [
        10000.0 ** (torch.arange(0, width, 2, dtype=torch.float64, device=device) / -width)
        for width in (dim - 4 * sixth, 2 * sixth, 2 * sixth)
    ]
    angles = torch.cat([axis[:, None] * f for axis, f in zip(points.view(-1, 3).t(), frequencies)], -1)
    return angles.cos(), angles.sin()


def rotated(x, cos, sin):
    """Rotate x [batch, tokens, heads, dim] by cos and sin [tokens, dim / 2]."""
    a, b = x.to(cos.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2).to(x.dtype)


class Rope3d(Workload):
    title = "rope3d"
    shapes = SHAPES
    small = (1, 1, 2, 4, 4, 64)

    def inputs(self, batch, frames, height, width, heads, dim):
        self.grid = (frames, height, width)
        # Tables for the peers that take them; a model makes them once for all layers.
        self.exact = tables(self.grid, dim, self.device)
        self.tables = [table.float() for table in self.exact]
        q, k = torch.rand(2, batch, math.prod(self.grid), heads, dim, device=self.device).sub(0.5).to(self.dtype)
        return q, k

    def ours(self, q, k):
        return self.kernel.rope3d(q, k, self.grid)

    def naive(self, q, k):
        return self.naive_kernel.rope3d(q, k, self.grid)

    def eager(self, q, k):
        cos, sin = self.exact if q.dtype == torch.float64 else self.tables
        return rotated(q, cos, sin), rotated(k, cos, sin)

    def saved(self, q, k):
        return ()


class ApplyRotary(Workload):
    title = "apply_rotary"
    shapes = SHAPES
    small = (1, 1, 2, 4, 4, 64)

    def inputs(self, batch, frames, height, width, heads, dim):
        cos, sin = (table.float() for table in tables((frames, height, width), dim, self.device))
        q, k = torch.rand(2, batch, len(cos), heads, dim, device=self.device).sub(0.5).to(self.dtype)
        return q, k, cos, sin

    def ours(self, q, k, cos, sin):
        return self.kernel.apply_rotary(q, k, cos, sin)

    def eager(self, q, k, cos, sin):
        return rotated(q, cos, sin), rotated(k, cos, sin)

    def trained(self, q, k, cos, sin):
        return q, k

    def saved(self, q, k, cos, sin):
        return cos, sin


EPS = 1e-6
# The models' settings, by their heads of q and of k and the elements of a head: the unit of normalization, how elements
# pair up, and whether values are rounded before the weight.
LTX, WAN, FLUX, QWEN3 = (1, 1, 2048), (12, 12, 128), (24, 24, 128), (32, 8, 128)
VIDEO_NORM = {"norm": "token", "pairs": "interleaved", "rounding": "last"}
QWEN3_NORM = {"norm": "head", "pairs": "half", "rounding": "before_weight"}
NORMS = {LTX: VIDEO_NORM, WAN: VIDEO_NORM, FLUX: {**VIDEO_NORM, "norm": "head"}, QWEN3: QWEN3_NORM}
# Batch, tokens, heads of q, heads of k, elements of a head.
NORM_MODELS = [(1, 2464, *LTX), (1, 7056, *LTX), (1, 7800, *WAN), (1, 32760, *WAN), (1, 4608, *FLUX), (1, 8192, *QWEN3)]
NORM_CPU = [(1, 128, *LTX), (1, 256, *WAN), (1, 128, *FLUX), (1, 128, *QWEN3)]


def normed(x, weight, norm, rounding):
    """Normalize x [batch, tokens, heads, dim]."""
    if rounding == "last":
        rows = x.flatten(2) if norm == "token" else x
        return F.rms_norm(rows, rows.shape[-1:], weight, EPS).view(x.shape)
    wide = x.float() if x.dtype != torch.float64 else x
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype)


def turned(x, cos, sin, pairs):
    """Rotate x [batch, tokens, heads, dim] by cos and sin [tokens, dim], in the dtype of their product."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    if pairs == "half":
        half = x.shape[-1] // 2
        other = torch.cat((-x[..., half:], x[..., :half]), -1)
    else:
        a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
        other = torch.stack([-b, a], -1).flatten(-2)
    return (x * cos + other * sin).to(x.dtype)


class NormRotary(Workload):
    title = "norm_rotary"
    shapes: ClassVar = {name: {"cuda": NORM_MODELS, "cpu": NORM_CPU} for name in ("forward", "backward")}
    small = (1, 8, *FLUX)

    def inputs(self, batch, tokens, q_heads, k_heads, dim):
        self.form = NORMS[q_heads, k_heads, dim]
        half = self.form["pairs"] == "half"
        angles = torch.arange(tokens)[:, None] * 1e4 ** (torch.arange(0, dim, 2, dtype=torch.float64) / -dim)
        angles = torch.cat([angles, angles], -1) if half else angles.repeat_interleave(2, -1)
        # Qwen3 has tables of its own dtype, the others float32.
        cos, sin = (t.to(self.device, self.dtype if half else torch.float32) for t in (angles.cos(), angles.sin()))
        q, k = (torch.randn(batch, tokens, heads, dim, device=self.device) for heads in (q_heads, k_heads))
        rows = [x.shape[-1] * (x.shape[-2] if self.form["norm"] == "token" else 1) for x in (q, k)]
        weights = (torch.rand(row, device=self.device) * 0.25 for row in rows)
        return *(t.to(self.dtype) for t in (q, k, *weights)), cos, sin

    def ours(self, q, k, q_weight, k_weight, cos, sin):
        return self.kernel.norm_rotary(q, k, q_weight, k_weight, cos, sin, eps=EPS, **self.form)

    def eager(self, q, k, q_weight, k_weight, cos, sin):
        norm, pairs, rounding = self.form["norm"], self.form["pairs"], self.form["rounding"]
        return tuple(turned(normed(x, w, norm, rounding), cos, sin, pairs) for x, w in ((q, q_weight), (k, k_weight)))

    def trained(self, q, k, q_weight, k_weight, cos, sin):
        return q, k, q_weight, k_weight
