"""Times the kernel beside eager PyTorch: `kernels benchmark kernels/rmsnorm`.

Every workload is checked against the formula in float32 before it is timed.
"""

import torch
from kernels.benchmark import Benchmark

EPS = 1e-6
# Rows and hidden size of a small and a large transformer's norm, of a norm over heads, and of a very wide one.
SHAPES = {"small": (1024, 2048), "large": (8192, 4096), "heads": (32768, 128), "wide": (4096, 16384)}


def eager(x, weight):
    x = x.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight.float()).to(weight.dtype)


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
        rows, hidden = SHAPES[shape]
        # The CPU has no time for the sizes of a GPU.
        rows = rows if self.device == "cuda" else rows // 16
        self.x, self.residual, self.grad = torch.randn(3, rows, hidden, device=self.device).bfloat16()
        # The runner allows for a difference of 0.01: results beyond 2 would differ by more when they round differently.
        self.weight = torch.rand(hidden, device=self.device).mul(0.25).bfloat16()


class RMSNorm(Workloads, Benchmark):
    def run(self) -> None:
        self.out = self.kernel.rms_norm(self.x, self.weight, EPS)

    def reference(self) -> torch.Tensor:
        return eager(self.x, self.weight)


class AddRMSNorm(Workloads, Benchmark):
    def run(self) -> None:
        self.out, _ = self.kernel.add_rms_norm(self.x, self.residual, self.weight, EPS)

    def reference(self) -> torch.Tensor:
        return eager(self.x + self.residual, self.weight)


class RMSNormBackward(Workloads, Benchmark):
    def prepare(self, shape: str) -> None:
        super().prepare(shape)
        self.x.requires_grad_()
        self.weight.requires_grad_()

    def run(self) -> None:
        normed = self.kernel.rms_norm(self.x, self.weight, EPS)
        self.out, _ = torch.autograd.grad(normed, (self.x, self.weight), self.grad)

    def reference(self) -> torch.Tensor:
        return torch.autograd.grad(eager(self.x, self.weight), (self.x, self.weight), self.grad)[0]
