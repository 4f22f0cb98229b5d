"""Times the kernel beside eager PyTorch: `kernels benchmark kernels/adaln`.

Every workload is checked against the formula in float32 before it is timed.
"""

import torch
import torch.nn.functional as F
from kernels.benchmark import Benchmark

EPS = 1e-6
# Batch, tokens and hidden size of DiT-XL, PixArt or LTX-Video, Wan 2.1 1.3B, and a large model.
SHAPES = {"dit": (2, 4096, 1152), "ltx": (2, 4992, 2048), "wan": (1, 7800, 1536), "large": (1, 16384, 3072)}


def eager_norm(x, scale, shift):
    normed = F.layer_norm(x.float(), (x.shape[-1],), eps=EPS)
    return (normed * (1 + scale.float()) + shift.float()).to(x.dtype)


def eager_gate(residual, branch, gate):
    return (residual.float() + branch.float() * gate.float()).to(residual.dtype)


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
        batch, tokens, hidden = SHAPES[shape]
        # The CPU has no time for the sizes of a GPU.
        tokens = tokens if self.device == "cuda" else tokens // 16
        # The runner allows for a difference of 0.01: large results would differ by more when they round differently.
        self.x, self.branch, self.grad = torch.randn(3, batch, tokens, hidden, device=self.device).mul(0.25).bfloat16()
        table = torch.rand(batch, 1, 6, hidden, device=self.device).mul(0.05).sub(0.8).bfloat16()
        self.shift, self.scale, self.gate = table.unbind(2)[:3]


class AdaLayerNorm(Workloads, Benchmark):
    def run(self) -> None:
        self.out = self.kernel.ada_layer_norm(self.x, self.scale, self.shift, eps=EPS)

    def reference(self) -> torch.Tensor:
        return eager_norm(self.x, self.scale, self.shift)


class GateResidual(Workloads, Benchmark):
    def run(self) -> None:
        self.out = self.kernel.gate_residual(self.x, self.branch, self.gate)

    def reference(self) -> torch.Tensor:
        return eager_gate(self.x, self.branch, self.gate)


class GateResidualAdaNorm(Workloads, Benchmark):
    def run(self) -> None:
        _, self.out = self.kernel.gate_residual_ada_norm(
            self.x, self.branch, self.gate, self.scale, self.shift, eps=EPS
        )

    def reference(self) -> torch.Tensor:
        return eager_norm(eager_gate(self.x, self.branch, self.gate), self.scale, self.shift)


class AdaLayerNormBackward(Workloads, Benchmark):
    def prepare(self, shape: str) -> None:
        super().prepare(shape)
        self.x.requires_grad_()
        self.scale, self.shift = (t.detach().requires_grad_() for t in (self.scale, self.shift))

    def run(self) -> None:
        normed = self.kernel.ada_layer_norm(self.x, self.scale, self.shift, eps=EPS)
        self.out, *_ = torch.autograd.grad(normed, (self.x, self.scale, self.shift), self.grad)

    def reference(self) -> torch.Tensor:
        normed = eager_norm(self.x, self.scale, self.shift)
        return torch.autograd.grad(normed, self.x, self.grad)[0]
