"""Layers for `kernels.kernelize`, which puts their `forward` into a model's modules. The modules keep their weights."""

import torch

from .gated import geglu, geglu_pair


class GEGLU(torch.nn.Module):
    """Replaces diffusers' `GEGLU`: a projection whose second half is the gate of the first."""

    has_backward = True
    can_torch_compile = True

    def forward(self, hidden_states: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        return geglu(self.proj(hidden_states))


class GemmaMLP(torch.nn.Module):
    """Replaces the MLP of transformers' Gemma models of every generation.

    Raises:
        ValueError: If `act_fn`, the model's activation, is not a gelu that the kernel supports.
    """

    has_backward = True
    can_torch_compile = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        activation = type(self.act_fn).__name__
        if activation not in _APPROXIMATE:
            raise ValueError(f"geglu: act_fn must be one of {sorted(_APPROXIMATE)}, not {activation}")
        return self.down_proj(geglu_pair(self.gate_proj(x), self.up_proj(x), _APPROXIMATE[activation]))


# By class name; transformers has renamed the class.
_APPROXIMATE = {"GELUActivation": "none", "GELUTanh": "tanh", "PytorchGELUTanh": "tanh"}


__all__ = ["GEGLU", "GemmaMLP"]
