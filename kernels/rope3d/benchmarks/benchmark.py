"""Workloads of rotary embeddings: `kernel-builder benchmark DIR` or `kernels benchmark DIR`."""

import math
import sys
from pathlib import Path

import torch

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
