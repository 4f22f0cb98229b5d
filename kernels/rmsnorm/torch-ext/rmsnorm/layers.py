"""Layers whose `forward` `kernels.kernelize` puts into a model's own modules, which keep their weights."""

import torch

from .norm import rms_norm


class RMSNorm(torch.nn.Module):
    """Stands in for `torch.nn.RMSNorm` over one dimension: with or without weight, and with its default `eps`."""

    has_backward = True
    can_torch_compile = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.weight is None and len(self.normalized_shape) != 1:
            raise ValueError(f"normalized_shape must have one dimension, not {tuple(self.normalized_shape)}")
        if self.weight is None and x.shape[-1] != self.normalized_shape[0]:
            raise ValueError(f"x must have {self.normalized_shape[0]} elements in its last dimension")
        return rms_norm(x, self.weight, torch.finfo(x.dtype).eps if self.eps is None else self.eps)


__all__ = ["RMSNorm"]
