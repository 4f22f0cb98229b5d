"""Layers whose `forward` `kernels.kernelize` puts into a model's own modules."""

import torch

from .op import relu


class ReLU(torch.nn.Module):
    """Stands in for `torch.nn.ReLU`."""

    has_backward = True
    can_torch_compile = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return relu(x)


__all__ = ["ReLU"]
