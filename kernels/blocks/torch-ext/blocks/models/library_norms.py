"""Norms of diffusers and transformers that no larger replacement computes."""

from typing import Optional

from torch import Tensor, nn

from ..kernel_set import adaln, rmsnorm
from ..replacements import replaces
from .torch_norms import one_dimension, takes_rows


def _one_dim(norm: nn.Module) -> Optional[str]:
    return None if len(norm.dim) == 1 else "it normalizes over several dimensions"


def _weight_and_variance_epsilon(norm: nn.Module) -> Optional[str]:
    return _mismatch_of(norm.weight, norm.variance_epsilon)


def _weight_and_eps(norm: nn.Module) -> Optional[str]:
    return _mismatch_of(norm.weight, norm.eps)


def _mismatch_of(weight: Tensor, eps: float) -> Optional[str]:
    if weight.dim() != 1:
        return "its weight has several dimensions"
    return None if isinstance(eps, float) else "its eps is not a float"


@replaces("diffusers.models.normalization.RMSNorm", does="RMSNorm", kernels=("rmsnorm",), mismatch=_one_dim)
class DiffusersRMSNorm:
    def forward(self, hidden_states: Tensor) -> Tensor:
        if not takes_rows(hidden_states, self.dim[0]):
            return super().forward(hidden_states)
        return rmsnorm.layers.DiffusersRMSNorm.forward(self, hidden_states)


@replaces("diffusers.models.normalization.FP32LayerNorm", does="LayerNorm", kernels=("adaln",), mismatch=one_dimension)
class DiffusersLayerNorm:
    def forward(self, inputs: Tensor) -> Tensor:
        if not takes_rows(inputs, self.normalized_shape[0]):
            return super().forward(inputs)
        return adaln.layers.FP32LayerNorm.forward(self, inputs)


@replaces(
    "transformers.models.llama.modeling_llama.LlamaRMSNorm",
    "transformers.models.mistral.modeling_mistral.MistralRMSNorm",
    "transformers.models.phi3.modeling_phi3.Phi3RMSNorm",
    "transformers.models.qwen2.modeling_qwen2.Qwen2RMSNorm",
    "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VLRMSNorm",
    "transformers.models.qwen3.modeling_qwen3.Qwen3RMSNorm",
    "transformers.models.qwen3_vl.modeling_qwen3_vl.Qwen3VLTextRMSNorm",
    does="RMSNorm",
    kernels=("rmsnorm",),
    mismatch=_weight_and_variance_epsilon,
)
class LlamaRMSNorm:
    def forward(self, hidden_states: Tensor) -> Tensor:
        if not takes_rows(hidden_states, self.weight.shape[0]):
            return super().forward(hidden_states)
        return rmsnorm.layers.LlamaRMSNorm.forward(self, hidden_states)


@replaces(
    "transformers.models.t5.modeling_t5.T5LayerNorm",
    "transformers.models.umt5.modeling_umt5.UMT5LayerNorm",
    does="RMSNorm",
    kernels=("rmsnorm",),
    mismatch=_weight_and_variance_epsilon,
)
class T5LayerNorm:
    def forward(self, hidden_states: Tensor) -> Tensor:
        # For other dtypes of the weight the norm rounds elsewhere than that of Llama.
        if not takes_rows(hidden_states, self.weight.shape[0]) or self.weight.dtype != hidden_states.dtype:
            return super().forward(hidden_states)
        return rmsnorm.layers.LlamaRMSNorm.forward(self, hidden_states)


@replaces(
    "transformers.models.olmo2.modeling_olmo2.Olmo2RMSNorm",
    "transformers.models.olmo3.modeling_olmo3.Olmo3RMSNorm",
    does="RMSNorm",
    kernels=("rmsnorm",),
    mismatch=_weight_and_variance_epsilon,
)
class OlmoRMSNorm:
    def forward(self, hidden_states: Tensor) -> Tensor:
        if not takes_rows(hidden_states, self.weight.shape[0]):
            return super().forward(hidden_states)
        return rmsnorm.layers.Olmo2RMSNorm.forward(self, hidden_states)


@replaces(
    "transformers.models.gemma.modeling_gemma.GemmaRMSNorm",
    "transformers.models.gemma2.modeling_gemma2.Gemma2RMSNorm",
    "transformers.models.gemma3.modeling_gemma3.Gemma3RMSNorm",
    does="RMSNorm",
    kernels=("rmsnorm",),
    mismatch=_weight_and_eps,
)
class GemmaRMSNorm:
    def forward(self, x: Tensor) -> Tensor:
        if not takes_rows(x, self.weight.shape[0]):
            return super().forward(x)
        return rmsnorm.layers.GemmaRMSNorm.forward(self, x)
