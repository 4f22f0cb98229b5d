"""Layers for `kernels.kernelize`, which puts their `forward` into a model's modules. The modules keep their weights."""

import torch

from .gated import geglu, geglu_pair, swiglu, swiglu_pair


class _Layer(torch.nn.Module):
    can_torch_compile = True


class GEGLU(_Layer):
    """Replaces diffusers' `GEGLU`: a projection whose second half is the gate of the first."""

    def forward(self, hidden_states: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        return geglu(self.proj(hidden_states))


class SwiGLU(_Layer):
    """Replaces diffusers' `SwiGLU`: a projection whose second half is the gate of the first."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return swiglu(self.proj(hidden_states))


class GatedMLP(_Layer):
    """Replaces transformers' gated MLPs with separate projections: of Llama, Mistral, Qwen 2 and 3, Olmo 2, Gemma.

    The model's `act_fn` decides between SwiGLU and GEGLU.

    Raises:
        ValueError: If `act_fn` is neither SiLU nor a gelu that the kernel supports.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        approximate = _approximate(self.act_fn, "act_fn")
        gated = swiglu_pair(gate, up) if approximate is None else geglu_pair(gate, up, approximate)
        return self.down_proj(gated)


class Phi3MLP(_Layer):
    """Replaces transformers' `Phi3MLP`: one projection, whose first half is the gate of the second.

    Raises:
        ValueError: If `activation_fn` is neither SiLU nor a gelu that the kernel supports.
    """

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = self.gate_up_proj(hidden_states)
        approximate = _approximate(self.activation_fn, "activation_fn")
        gated = swiglu(x, gate="first") if approximate is None else geglu(x, approximate=approximate, gate="first")
        return self.down_proj(gated)


# Activations by class name, because classes of one name come from several libraries: None is SiLU, the others are
# values of `approximate`. transformers has several implementations of each gelu, which differ in rounding only.
_ACTIVATIONS = {
    "SiLU": None,
    "SiLUActivation": None,
    "GELUActivation": "none",
    "AccurateGELUActivation": "tanh",
    "FastGELUActivation": "tanh",
    "GELUTanh": "tanh",
    "NewGELUActivation": "tanh",
    "PytorchGELUTanh": "tanh",
}


def _approximate(activation, attribute):
    name = type(activation).__name__
    if name not in _ACTIVATIONS:
        raise ValueError(f"geglu: {attribute} must be one of {sorted(_ACTIVATIONS)}, not {name}")
    return _ACTIVATIONS[name]


__all__ = ["GEGLU", "GatedMLP", "Phi3MLP", "SwiGLU"]
