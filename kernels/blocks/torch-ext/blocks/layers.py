"""Layers for transformers' `use_kernels` and `KernelConfig`, and for `kernels.kernelize`, by the names of the models.

They put their `forward` into a model's modules, which keep their weights.
"""

import torch
from torch import Tensor

from .kernel_set import geglu, rmsnorm, rope3d


# `kernels describe-api` lists only classes that a class statement of this package defines.
class GatedMLP(geglu.layers.GatedMLP):
    """The layer of the kernel geglu."""


class GemmaRMSNorm(rmsnorm.layers.GemmaRMSNorm):
    """The layer of the kernel rmsnorm."""


class LlamaRMSNorm(rmsnorm.layers.LlamaRMSNorm):
    """The layer of the kernel rmsnorm."""


class Olmo2RMSNorm(rmsnorm.layers.Olmo2RMSNorm):
    """The layer of the kernel rmsnorm."""


class Phi3MLP(geglu.layers.Phi3MLP):
    """The layer of the kernel geglu."""


class RotaryPosEmb(torch.nn.Module):
    """Replaces transformers' `apply_rotary_pos_emb`, whose layer name is "rotary_pos_emb"."""

    has_backward = True
    can_torch_compile = True

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        layout = "bhsd" if unsqueeze_dim == 1 else "bshd"
        return rope3d.apply_rotary(q, k, cos, sin, pairs="half", layout=layout, rotary_dim=cos.shape[-1])


__all__ = ["GatedMLP", "GemmaRMSNorm", "LlamaRMSNorm", "Olmo2RMSNorm", "Phi3MLP", "RotaryPosEmb"]
