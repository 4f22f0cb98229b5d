"""Layers for `kernels.kernelize`, which puts their `forward` into a model's modules. The modules keep their weights.

Each computes the same as the module it replaces, roundings included. Where one call of
the kernel is not enough, Torch ops compute the rest.
"""

from typing import Optional

import torch
from torch import Tensor

from .norm import ada_layer_norm


def _layer_norm(norm: torch.nn.LayerNorm, x: Tensor) -> Tensor:
    if tuple(norm.normalized_shape) != tuple(x.shape[-1:]):
        raise ValueError(f"normalized_shape must be {tuple(x.shape[-1:])}, not {tuple(norm.normalized_shape)}")
    weight, bias = (p if p is None or p.dtype == x.dtype else p.float() for p in (norm.weight, norm.bias))
    return ada_layer_norm(x, None, None, weight, bias, norm.eps)


def _modulated(norm: torch.nn.Module, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    plain = isinstance(norm, torch.nn.LayerNorm) and tuple(norm.normalized_shape) == tuple(x.shape[-1:])
    if plain and norm.weight is None and scale.dtype == x.dtype:
        return ada_layer_norm(x, scale, shift, eps=norm.eps, rounding="each")
    return norm(x) * (1 + scale)[:, None] + shift[:, None]


class _Layer(torch.nn.Module):
    can_torch_compile = True


class LayerNorm(_Layer):
    """Replaces `torch.nn.LayerNorm` over one dimension, with or without weight and bias."""

    def forward(self, input: Tensor) -> Tensor:
        return _layer_norm(self, input)


class FP32LayerNorm(_Layer):
    """Replaces diffusers' `FP32LayerNorm` over one dimension, for any dtypes of x and weight."""

    def forward(self, inputs: Tensor) -> Tensor:
        return _layer_norm(self, inputs)


class AdaLayerNormZero(_Layer):
    """Replaces diffusers' `AdaLayerNormZero`: norm and modulation are one kernel."""

    def forward(
        self,
        x: Tensor,
        timestep: Optional[Tensor] = None,
        class_labels: Optional[Tensor] = None,
        hidden_dtype: Optional[torch.dtype] = None,
        emb: Optional[Tensor] = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        if self.emb is not None:
            emb = self.emb(timestep, class_labels, hidden_dtype=hidden_dtype)
        shift, scale, *others = self.linear(self.silu(emb)).chunk(6, dim=1)
        return (_modulated(self.norm, x, scale, shift), *others)


class AdaLayerNormZeroSingle(_Layer):
    """Replaces diffusers' `AdaLayerNormZeroSingle`: norm and modulation are one kernel."""

    def forward(self, x: Tensor, emb: Optional[Tensor] = None) -> tuple[Tensor, Tensor]:
        shift, scale, gate = self.linear(self.silu(emb)).chunk(3, dim=1)
        return _modulated(self.norm, x, scale, shift), gate


class AdaLayerNormContinuous(_Layer):
    """Replaces diffusers' `AdaLayerNormContinuous`: one kernel if its LayerNorm has no weight."""

    def forward(self, x: Tensor, conditioning_embedding: Tensor) -> Tensor:
        scale, shift = self.linear(self.silu(conditioning_embedding).to(x.dtype)).chunk(2, dim=1)
        return _modulated(self.norm, x, scale, shift)


__all__ = ["AdaLayerNormContinuous", "AdaLayerNormZero", "AdaLayerNormZeroSingle", "FP32LayerNorm", "LayerNorm"]
