"""Layers with which `kernels.kernelize` replaces modules of a model."""

import torch

from .op import softmax


class Softmax(torch.nn.Module):
    """Replaces `torch.nn.Softmax`. Another dimension than the last one is left to PyTorch."""

    has_backward = True
    can_torch_compile = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.dim not in (-1, x.dim() - 1):
            return torch.nn.functional.softmax(x, self.dim)
        return softmax(x)


__all__ = ["Softmax"]
