"""Layers for `kernels.kernelize`, which puts their `forward` into a model's modules. The modules keep their weights.

Each computes the same as the module it replaces, roundings included, for any dtypes of x and weight. Where one
call of the kernel is not enough, Torch ops compute the rest.
"""

import torch
from torch import Tensor

from .norm import rms_norm


class _Layer(torch.nn.Module):
    can_torch_compile = True


class RMSNorm(_Layer):
    """Replaces `torch.nn.RMSNorm` over one dimension, with or without weight, including its default `eps`."""

    def forward(self, x: Tensor) -> Tensor:
        if self.weight is None and len(self.normalized_shape) != 1:
            raise ValueError(f"normalized_shape must have one dimension, not {tuple(self.normalized_shape)}")
        if self.weight is None and x.shape[-1] != self.normalized_shape[0]:
            raise ValueError(f"x must have {self.normalized_shape[0]} elements in its last dimension")
        return rms_norm(x, self.weight, torch.finfo(x.dtype).eps if self.eps is None else self.eps)


class LlamaRMSNorm(_Layer):
    """Replaces the norms of transformers that round before the weight: Llama, Qwen 2 and 3, Mistral, Phi 3, ...

    They have a `weight` and a `variance_epsilon`. The result has the dtype to which Torch promotes x and weight.
    """

    def forward(self, hidden_states: Tensor) -> Tensor:
        weight = self.weight if self.weight.dtype == hidden_states.dtype else self.weight.float()
        return rms_norm(hidden_states, weight, self.variance_epsilon, rounding="before_weight")


class Olmo2RMSNorm(_Layer):
    """Replaces the norms of transformers that round after the weight, to the dtype of x: Olmo 2 and 3, ...

    They have a `weight` and a `variance_epsilon`.
    """

    def forward(self, hidden_states: Tensor) -> Tensor:
        weight = self.weight if self.weight.dtype == hidden_states.dtype else self.weight.float()
        return rms_norm(hidden_states, weight, self.variance_epsilon)


class GemmaRMSNorm(_Layer):
    """Replaces the norms of transformers that multiply by `1 + weight`: Gemma 1 to 3, Qwen 3 Next, ...

    They have a `weight` and an `eps`, and round once, after the weight, to the dtype of x.
    """

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self.weight.dtype == x.dtype else self.weight.float()
        return rms_norm(x, weight, self.eps, offset=1.0)


class DiffusersRMSNorm(_Layer):
    """Replaces diffusers' `RMSNorm` over one dimension, with or without `weight` and `bias`.

    Without weight the result has the dtype of x. With a float16 or bfloat16 weight it has the dtype of the weight, and
    is rounded to it before the weight as well. With a float32 weight it is float32.
    """

    def forward(self, hidden_states: Tensor) -> Tensor:
        weight = self.weight
        if len(self.dim) != 1:
            raise ValueError(f"dim must be one dimension, not {tuple(self.dim)}")
        if weight is None:
            return rms_norm(hidden_states, None, self.eps)
        if weight.dtype == hidden_states.dtype:
            normed = rms_norm(hidden_states, weight, self.eps, rounding="before_weight")
        elif weight.dtype == torch.float32:
            normed = rms_norm(hidden_states.float(), weight, self.eps)
        else:
            normed = rms_norm(hidden_states.float(), None, self.eps).to(weight.dtype) * weight
        return normed if self.bias is None else normed + self.bias


__all__ = ["DiffusersRMSNorm", "GemmaRMSNorm", "LlamaRMSNorm", "Olmo2RMSNorm", "RMSNorm"]
