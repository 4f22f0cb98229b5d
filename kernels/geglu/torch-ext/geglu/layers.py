"""Layers whose `forward` `kernels.kernelize` puts into a model's own modules, which keep their weights."""

import torch

from .gated import geglu


class GEGLU(torch.nn.Module):
    """Stands in for diffusers' `GEGLU`: a projection, of which the second half is the gate of the first."""

    has_backward = True
    can_torch_compile = True

    def forward(self, hidden_states: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        return geglu(self.proj(hidden_states))


__all__ = ["GEGLU"]
