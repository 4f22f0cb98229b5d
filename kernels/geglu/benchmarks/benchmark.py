"""Times the kernel beside eager PyTorch: `kernels benchmark kernels/geglu`.

Every workload is checked against the formula in float32 before it is timed.
"""

import torch
import torch.nn.functional as F
from kernels.benchmark import Benchmark

# Rows and hidden size of feed-forward layers: SDXL's, an image transformer's, a large language model's.
SHAPES = {"small": (4096, 2560), "medium": (4992, 8192), "large": (16384, 8192)}


def eager(gate, up, approximate):
    return (up.float() * F.gelu(gate.float(), approximate=approximate)).to(up.dtype)


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
        # The runner allows for a difference of 0.01: results beyond 2 would differ by more when they round differently.
        self.x = torch.randn(rows, 2 * hidden, device=self.device).clamp(-1, 1).bfloat16()
        self.up, self.gate = self.x.chunk(2, -1)
        self.grad = torch.rand(rows, hidden, device=self.device).bfloat16()


class GEGLU(Workloads, Benchmark):
    def run(self) -> None:
        self.out = self.kernel.geglu(self.x)

    def reference(self) -> torch.Tensor:
        return eager(self.gate, self.up, "none")


class GEGLUPairTanh(Workloads, Benchmark):
    def prepare(self, shape: str) -> None:
        super().prepare(shape)
        self.gate, self.up = self.gate.contiguous(), self.up.contiguous()

    def run(self) -> None:
        self.out = self.kernel.geglu_pair(self.gate, self.up, "tanh")

    def reference(self) -> torch.Tensor:
        return eager(self.gate, self.up, "tanh")


class GEGLUBackward(Workloads, Benchmark):
    def prepare(self, shape: str) -> None:
        super().prepare(shape)
        self.x.requires_grad_()

    def run(self) -> None:
        (self.out,) = torch.autograd.grad(self.kernel.geglu(self.x), self.x, self.grad)

    def reference(self) -> torch.Tensor:
        up, gate = self.x.chunk(2, -1)
        return torch.autograd.grad(eager(gate, up, "none"), self.x, self.grad)[0]
