"""Gated MLPs of transformers: activation and product in one kernel."""

from functools import cache
from typing import Optional

from torch import Tensor, nn

from ..kernel_set import geglu, takes
from ..replacements import Mismatch, is_own, path_of, replaces

# "silu", or for gelu the argument `approximate` of its kernels.
_ACTIVATIONS = {
    "torch.nn.modules.activation.SiLU": "silu",
    "transformers.activations.SiLUActivation": "silu",
    "transformers.activations.GELUActivation": "none",
    "transformers.activations.GELUTanh": "tanh",
    "transformers.activations.NewGELUActivation": "tanh",
}


@cache
def _activation_of_class(cls: type) -> Optional[str]:
    return _ACTIVATIONS.get(path_of(cls))


def _activation_of(module: nn.Module) -> Optional[str]:
    """Return what the kernels call the activation `module`, or None if it must be called."""
    activation = _activation_of_class(type(module))
    return activation if activation is not None and is_own(module, type(module)) else None


def _mlp_mismatch(activation: str, *names: str) -> Mismatch:
    """Return a mismatch that asks for the activation at this name, and for the attributes `names`."""

    def mismatch(mlp: nn.Module) -> Optional[str]:
        for name in names:
            getattr(mlp, name)
        module = getattr(mlp, activation)
        if _activation_of(module) is None:
            return f"its activation is {type(module).__name__}, which no kernel computes"
        return None

    return mismatch


@replaces(
    "transformers.models.gemma2.modeling_gemma2.Gemma2MLP",
    "transformers.models.gemma3.modeling_gemma3.Gemma3MLP",
    "transformers.models.llama.modeling_llama.LlamaMLP",
    "transformers.models.mistral.modeling_mistral.MistralMLP",
    "transformers.models.olmo2.modeling_olmo2.Olmo2MLP",
    "transformers.models.qwen2.modeling_qwen2.Qwen2MLP",
    "transformers.models.qwen3.modeling_qwen3.Qwen3MLP",
    does="activation of the gate, and the product",
    kernels=("geglu",),
    mismatch=_mlp_mismatch("act_fn", "gate_proj", "up_proj", "down_proj"),
)
class GatedMLP:
    def forward(self, x: Tensor) -> Tensor:
        activation = _activation_of(self.act_fn) if takes(x) else None
        if activation is None:
            return super().forward(x)
        gate, up = self.gate_proj(x), self.up_proj(x)
        if activation == "silu":
            return self.down_proj(geglu.swiglu_pair(gate, up))
        return self.down_proj(geglu.geglu_pair(gate, up, activation))


@replaces(
    "transformers.models.phi3.modeling_phi3.Phi3MLP",
    does="activation of the gate, and the product",
    kernels=("geglu",),
    mismatch=_mlp_mismatch("activation_fn", "gate_up_proj", "down_proj"),
)
class Phi3MLP:
    def forward(self, hidden_states: Tensor) -> Tensor:
        activation = _activation_of(self.activation_fn) if takes(hidden_states) else None
        if activation is None:
            return super().forward(hidden_states)
        x = self.gate_up_proj(hidden_states)
        if activation == "silu":
            return self.down_proj(geglu.swiglu(x, gate="first"))
        return self.down_proj(geglu.geglu(x, approximate=activation, gate="first"))
