"""Layers with which `kernels.kernelize` replaces modules of a model."""

import torch

from .op import ${operator}


class ${layer}(torch.nn.Module):
    """${replaces} `kernelize` takes its `forward` alone, so the class has no state."""

    has_backward = True
    can_torch_compile = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ${operator}(x)


__all__ = ["${layer}"]
