"""Workloads of GEGLU and SwiGLU: `kernel-builder benchmark DIR` or `kernels benchmark DIR`."""

import sys
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent))
from workload import Workload, peer

# Batch, tokens, hidden size: feed-forward layers of SDXL and of larger image models.
LAYERS = [(2, 4096, 1280), (1, 4096, 2560), (2, 1024, 5120), (1, 4992, 8192), (1, 16384, 8192)]
# Unusual widths, a single row, and many short rows.
OTHERS = [(1, 4096, 1000), (1, 4096, 7168), (1, 1, 8192), (1, 131072, 64)]
CPU = [(2, 256, 1280), (1, 256, 5120)]
SHAPES = {name: {"cuda": LAYERS + OTHERS, "cpu": CPU} for name in ("forward", "backward")}
# Feed-forward layers of Qwen3-8B for two tensors, and of an image model for halves.
SWIGLU = {"cuda": [(1, 8192, 8192)], "cpu": [(1, 256, 5120)]}
SWIGLU_PAIR = {"cuda": [(1, 128, 12288), (1, 8192, 12288)], "cpu": [(1, 128, 12288)]}

ACTIVATIONS = {"gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "silu": F.silu}

GEGLU_PEERS = {"liger": peer("liger_kernel.ops.geglu", "LigerGELUMulFunction.apply")}
SWIGLU_PEERS = {"liger": peer("liger_kernel.ops.swiglu", "LigerSiLUMulFunction.apply")}


class GEGLU(Workload):
    title = "geglu"
    shapes = SHAPES
    small = (1, 8, 1024)
    activation = "gelu"

    def inputs(self, batch, tokens, hidden):
        x = torch.randn(batch, tokens, 2 * hidden, device=self.device).clamp(-1, 1)
        return (x.to(self.dtype),)

    def ours(self, x):
        return self.kernel.geglu(x)

    def naive(self, x):
        return self.naive_kernel.of_halves(x, self.activation)

    def eager(self, x):
        up, gate = x.chunk(2, -1)
        return up * ACTIVATIONS[self.activation](gate)


class GEGLUTanh(GEGLU):
    title = "geglu, tanh"
    activation = "gelu_tanh"

    def ours(self, x):
        return self.kernel.geglu(x, approximate="tanh")


class GEGLUPair(Workload):
    title = "geglu_pair, tanh"
    shapes = SHAPES
    small = (1, 8, 1024)
    peers = GEGLU_PEERS
    activation = "gelu_tanh"

    def inputs(self, batch, tokens, hidden):
        gate, up = torch.randn(2, batch, tokens, hidden, device=self.device).clamp(-1, 1).to(self.dtype)
        return gate, up

    def ours(self, gate, up):
        return self.kernel.geglu_pair(gate, up, "tanh")

    def naive(self, gate, up):
        return self.naive_kernel.of_pair(gate, up, self.activation)

    def eager(self, gate, up):
        return up * ACTIVATIONS[self.activation](gate)


class SwiGLU(Workload):
    title = "swiglu"
    shapes = dict.fromkeys(("forward", "forward + backward"), SWIGLU)
    small = (1, 8, 1024)
    activation = "silu"
    inputs, naive, eager = GEGLU.inputs, GEGLU.naive, GEGLU.eager

    def ours(self, x):
        return self.kernel.swiglu(x)


class SwiGLUPair(Workload):
    title = "swiglu_pair"
    shapes = dict.fromkeys(("forward", "forward + backward"), SWIGLU_PAIR)
    small = (1, 8, 1024)
    peers = SWIGLU_PEERS
    activation = "silu"
    inputs, naive, eager = GEGLUPair.inputs, GEGLUPair.naive, GEGLUPair.eager

    def ours(self, gate, up):
        return self.kernel.swiglu_pair(gate, up)
