"""Workloads of adaptive norms and gated residuals: `kernel-builder benchmark DIR` or `kernels benchmark DIR`."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent))
from workload import Workload

EPS = 1e-6

# Batch, tokens, hidden size: PixArt and DiT-XL, LTX-Video, Wan 2.1 and larger models.
BLOCKS = [(2, 1024, 2048), (1, 4096, 3072), (2, 4992, 2048), (1, 16384, 3072), (2, 4096, 1152)]
# Unusual widths, a single row, and many short rows.
OTHERS = [(1, 4096, 1000), (1, 4096, 5120), (1, 4096, 7168), (1, 1, 3072), (1, 131072, 64)]
# Wan 2.1 (two sizes of video) and LTX-Video (two), after attention to the text.
WAN, LTX = [(1, 7800, 1536), (1, 32760, 1536)], [(1, 2464, 2048), (1, 7056, 2048)]
CPU = [(2, 256, 1152), (1, 256, 3072)]
SHAPES, WAN_SHAPES, LTX_SHAPES = (
    {name: {"cuda": shapes, "cpu": CPU} for name in ("forward", "backward")}
    for shapes in (BLOCKS + OTHERS, WAN + OTHERS, LTX)
)


class Block:
    """A transformer block, in which shift, scale and gate are slices of one tensor."""

    small = (1, 8, 1024)

    def inputs(self, batch, tokens, hidden):
        x, branch = torch.randn(2, batch, tokens, hidden, device=self.device).mul(0.25).to(self.dtype)
        table = torch.rand(batch, 1, 6, hidden, device=self.device).mul(0.05).sub(0.8).to(self.dtype)
        shift, scale, gate = (part.detach() for part in table.unbind(2)[:3])
        return x, branch, gate, scale, shift


def wide(x):
    return x.float() if x.dtype != torch.float64 else x


def layer_norm(x, scale, shift):
    normed = F.layer_norm(wide(x), (x.shape[-1],), eps=EPS)
    return (normed * (1 + wide(scale)) + wide(shift)).to(x.dtype)


def rms_norm(x, weight, scale, shift):
    normed = wide(x) * torch.rsqrt(wide(x).square().mean(-1, keepdim=True) + EPS) * wide(weight)
    return (normed * (1 + wide(scale)) + wide(shift)).to(x.dtype)


def gated(residual, branch, gate):
    return (wide(residual) + wide(branch) * wide(gate)).to(residual.dtype)


def liger_ada_rms_norm():
    from liger_kernel.ops.modulated_rms_norm import LigerModulatedRMSNormFunction

    return lambda x, weight, scale, shift: LigerModulatedRMSNormFunction.apply(
        x, weight, scale.squeeze(1), shift.squeeze(1), EPS, 0.0, "llama", False
    )


ADA_RMS_NORM_PEERS = {"liger": liger_ada_rms_norm}


class AdaLayerNorm(Block, Workload):
    title = "ada_layer_norm"
    shapes = SHAPES
    eager = staticmethod(layer_norm)

    def inputs(self, *shape):
        x, _, _, scale, shift = super().inputs(*shape)
        return x, scale, shift

    def ours(self, x, scale, shift):
        return self.kernel.ada_layer_norm(x, scale, shift, eps=EPS)

    def naive(self, x, scale, shift):
        return self.naive_kernel.ada_layer_norm(x, scale, shift, EPS)


class AdaRMSNorm(Block, Workload):
    title = "ada_rms_norm"
    shapes = SHAPES
    peers = ADA_RMS_NORM_PEERS
    eager = staticmethod(rms_norm)

    def inputs(self, *shape):
        x, _, _, scale, shift = super().inputs(*shape)
        weight = torch.rand(shape[-1], device=self.device).to(self.dtype)
        return x, weight, scale, shift

    def ours(self, x, weight, scale, shift):
        return self.kernel.ada_rms_norm(x, scale, shift, weight, eps=EPS)


class GateResidual(Block, Workload):
    title = "gate_residual"
    shapes = SHAPES
    eager = staticmethod(gated)

    def inputs(self, *shape):
        return super().inputs(*shape)[:3]

    def ours(self, residual, branch, gate):
        return self.kernel.gate_residual(residual, branch, gate)

    def saved(self, residual, branch, gate):
        return branch, gate


class GateResidualAdaNorm(Block, Workload):
    title = "gate_residual_ada_norm"
    shapes = SHAPES

    def ours(self, residual, branch, gate, scale, shift):
        return self.kernel.gate_residual_ada_norm(residual, branch, gate, scale, shift, eps=EPS)

    def eager(self, residual, branch, gate, scale, shift):
        total = gated(residual, branch, gate)
        return total, layer_norm(total, scale, shift)


class AddAdaNorm(Block, Workload):
    """A sum without gate and a LayerNorm that is modulated in float32, as in Wan."""

    title = "add_ada_norm"
    shapes = WAN_SHAPES

    def inputs(self, *shape):
        residual, branch, _, scale, shift = super().inputs(*shape)
        return residual, branch, wide(scale), wide(shift)

    def ours(self, residual, branch, scale, shift):
        return self.kernel.add_ada_norm(residual, branch, scale, shift, eps=EPS)

    def eager(self, residual, branch, scale, shift):
        total = residual + branch
        return total, layer_norm(total, scale, shift)

    def saved(self, residual, branch, scale, shift):
        return residual, scale


class AddAdaRMSNorm(Block, Workload):
    """A sum without gate and an RMSNorm that is modulated in the dtype of the rows, as in LTX-Video."""

    title = "add_ada_norm, rms"
    shapes = LTX_SHAPES
    saved = AddAdaNorm.saved

    def inputs(self, *shape):
        residual, branch, _, scale, shift = super().inputs(*shape)
        return residual, branch, scale, shift

    def ours(self, residual, branch, scale, shift):
        return self.kernel.add_ada_norm(residual, branch, scale, shift, eps=EPS, norm="rms", rounding="each")

    def eager(self, residual, branch, scale, shift):
        total = residual + branch
        normed = wide(total) * torch.rsqrt(wide(total).square().mean(-1, keepdim=True) + EPS)
        return total, normed.to(total.dtype) * (1 + scale) + shift
