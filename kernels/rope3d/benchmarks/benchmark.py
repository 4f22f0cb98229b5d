"""Times the kernel beside eager PyTorch: `kernels benchmark kernels/rope3d`.

Every workload is checked against the formula in float64 before it is timed.
"""

import math

import torch
from kernels.benchmark import Benchmark

# Batch, frames, height, width, heads and elements of a head, of small and large video models.
SHAPES = {
    "small": (1, 7, 16, 24, 32, 64),
    "large": (1, 13, 30, 44, 16, 128),
    "long": (1, 21, 45, 80, 12, 128),
    "batch": (2, 7, 22, 40, 24, 128),
}


def angles(grid, dim, device):
    """[tokens, dim / 2], in float64."""
    sixth = dim // 6
    points = torch.cartesian_prod(*(torch.arange(size, dtype=torch.float64, device=device) for size in grid)).t()
    frequencies = [
        10000.0 ** (torch.arange(0, width, 2, dtype=torch.float64, device=device) / -width)
        for width in (dim - 4 * sixth, 2 * sixth, 2 * sixth)
    ]
    return torch.cat([p[:, None] * f for p, f in zip(points, frequencies)], -1)


def eager(x, cos, sin):
    """Of x [batch, tokens, heads, dim], by cos and sin [tokens, 1, dim / 2]."""
    a, b = x[..., ::2], x[..., 1::2]
    out = torch.empty_like(x)
    out[..., ::2] = a * cos - b * sin
    out[..., 1::2] = a * sin + b * cos
    return out


class Workloads:
    """What the benchmarks share. No `Benchmark` itself, since the runner runs every one that it finds."""

    seed = 42

    def __init_subclass__(cls) -> None:
        # One workload for each shape: the runner finds them by the names of methods.
        for name in SHAPES:
            setattr(cls, f"setup_{name}", lambda self, name=name: self.prepare(name))
            setattr(cls, f"benchmark_{name}", lambda self: self.run())
            setattr(cls, f"verify_{name}", lambda self: self.reference())

    def prepare(self, shape: str) -> None:
        batch, *grid, heads, dim = SHAPES[shape]
        # The CPU has no time for the sizes of a GPU.
        self.grid = grid if self.device == "cuda" else (1, *grid[1:])
        tokens = math.prod(self.grid)
        # The runner allows for a difference of 0.01: results beyond 2 would differ by more when they round differently.
        self.q, self.k, self.grad = (torch.rand(3, batch, tokens, heads, dim, device=self.device) - 0.5).bfloat16()

    def tables(self):
        turn = angles(self.grid, self.q.shape[-1], self.q.device).unsqueeze(1)
        return turn.cos(), turn.sin()


class Rope3d(Workloads, Benchmark):
    def run(self) -> None:
        self.out, _ = self.kernel.rope3d(self.q, self.k, self.grid)

    def reference(self) -> torch.Tensor:
        return eager(self.q, *self.tables())


class ApplyRotary(Workloads, Benchmark):
    def prepare(self, shape: str) -> None:
        super().prepare(shape)
        self.cos, self.sin = (t.float().squeeze(1) for t in self.tables())

    def run(self) -> None:
        self.out, _ = self.kernel.apply_rotary(self.q, self.k, self.cos, self.sin)

    def reference(self) -> torch.Tensor:
        return eager(self.q, *self.tables())


class Rope3dBackward(Workloads, Benchmark):
    def prepare(self, shape: str) -> None:
        super().prepare(shape)
        self.q.requires_grad_()
        self.k.requires_grad_()

    def run(self) -> None:
        rotated = self.kernel.rope3d(self.q, self.k, self.grid)
        self.out, _ = torch.autograd.grad(rotated, (self.q, self.k), (self.grad, self.grad))

    def reference(self) -> torch.Tensor:
        cos, sin = self.tables()
        return eager(self.grad, cos, -sin)
