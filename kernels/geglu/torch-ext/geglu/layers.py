"""Layers whose `forward` `kernels.kernelize` puts into a model's own modules, which keep their weights."""

import torch

from .gated import geglu, geglu_pair


class GEGLU(torch.nn.Module):
    """Stands in for diffusers' `GEGLU`: a projection, of which the second half is the gate of the first."""

    has_backward = True
    can_torch_compile = True

    def forward(self, hidden_states: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        return geglu(self.proj(hidden_states))


class GemmaMLP(torch.nn.Module):
    """Stands in for the MLP of transformers' Gemma models, of any generation.

    Raises:
        ValueError: If `act_fn`, the model's activation, is no gelu that this kernel has.
    """

    has_backward = True
    can_torch_compile = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        activation = type(self.act_fn).__name__
        if activation not in _APPROXIMATE:
            raise ValueError(f"geglu: act_fn must be one of {sorted(_APPROXIMATE)}, not {activation}")
        return self.down_proj(geglu_pair(self.gate_proj(x), self.up_proj(x), _APPROXIMATE[activation]))


# By the names of transformers' modules, which have changed.
_APPROXIMATE = {"GELUActivation": "none", "GELUTanh": "tanh", "PytorchGELUTanh": "tanh"}


__all__ = ["GEGLU", "GemmaMLP"]
