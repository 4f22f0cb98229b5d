"""Workloads of RMSNorm: `kernel-builder benchmark DIR` or `kernels benchmark DIR`."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent))
from workload import Workload, peer

EPS = 1e-6

# Batch, tokens, hidden size: transformers from 1 to 70 billion parameters, norms over heads, very wide rows.
TUNED = [(1, 1024, 2048), (2, 1024, 2048), (1, 4096, 2048), (2, 4096, 3072), (1, 8192, 2048), (4, 4096, 3072)]
TUNED += [*((1, 2**n, 4096) for n in (7, 9, 10, 11, 12, 13)), (1, 16384, 8192), (1, 32768, 128), (1, 4096, 16384)]
# Unusual widths, a single row, and many short rows.
OTHERS = [(1, 4096, 1000), (1, 4096, 1152), (1, 4096, 5120), (1, 4096, 7168), (1, 1, 4096), (1, 131072, 64)]
TRAINED = [(1, 4096, 2048), (1, 8192, 4096), (4, 4096, 3072)]
CPU = [(1, 512, 2048), (1, 512, 4096), (1, 8192, 128), (1, 512, 5120)]
BOTH = {"cuda": TRAINED + OTHERS, "cpu": CPU}
NORM_SHAPES = {"forward": {"cuda": TUNED + OTHERS, "cpu": CPU}, "forward + backward": BOTH}


def normed(x, weight):
    wide = x.float() if x.dtype != torch.float64 else x
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight).to(x.dtype)


def quack_add_rms_norm():
    from quack import rmsnorm

    return lambda x, residual, weight: rmsnorm(x, weight, residual=residual, eps=EPS, prenorm=True)


NORM_PEERS = {
    "F.rms_norm": lambda: lambda x, weight: F.rms_norm(x, (x.shape[-1],), weight, EPS),
    "liger": peer("liger_kernel.ops.rms_norm", "LigerRMSNormFunction.apply", EPS, 0.0, "llama", False),
    "quack": peer("quack", "rmsnorm", eps=EPS),
}
ADD_PEERS = {
    "liger": peer("liger_kernel.ops.fused_add_rms_norm", "LigerFusedAddRMSNormFunction.apply", EPS),
    "quack": quack_add_rms_norm,
}


class RMSNorm(Workload):
    title = "rms_norm"
    shapes = NORM_SHAPES
    small = (1, 8, 1024)
    peers = NORM_PEERS

    def inputs(self, batch, tokens, hidden):
        x = torch.randn(batch, tokens, hidden, device=self.device)
        weight = torch.rand(hidden, device=self.device) * 0.25
        return x.to(self.dtype), weight.to(self.dtype)

    def ours(self, x, weight):
        return self.kernel.rms_norm(x, weight, EPS)

    def naive(self, x, weight):
        return self.naive_kernel.rms_norm(x, weight, EPS)

    eager = staticmethod(normed)


class AddRMSNorm(Workload):
    title = "add_rms_norm"
    shapes = dict.fromkeys(("forward", "backward"), BOTH)
    small = (1, 8, 1024)
    peers = ADD_PEERS

    def inputs(self, batch, tokens, hidden):
        x, residual = torch.randn(2, batch, tokens, hidden, device=self.device).to(self.dtype)
        weight = torch.rand(hidden, device=self.device) * 0.25
        return x, residual, weight.to(self.dtype)

    def ours(self, x, residual, weight):
        return self.kernel.add_rms_norm(x, residual, weight, EPS)

    def eager(self, x, residual, weight):
        total = x + residual
        return normed(total, weight), total

    def saved(self, x, residual, weight):
        return x, weight  # the backward pass reads the sum, which is as large as x
