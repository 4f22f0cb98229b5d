"""The naive kernels of one decoding step: see decode.cu."""

from torch import Tensor

from ._ops import ops


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return `x @ weight.T` for contiguous matrices."""
    return ops.linear(x, weight)


def gated_linear(x: Tensor, gate_weight: Tensor, up_weight: Tensor) -> Tensor:
    """Return `silu(x @ gate_weight.T) * (x @ up_weight.T)` for contiguous matrices."""
    return ops.linear(x, gate_weight, up_weight)


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return the attention of one token per sequence, [batch, 1, query_heads, elements], for contiguous tensors."""
    return ops.attention(query, key, value, query.shape[-1] ** -0.5)


__all__ = ["attention", "gated_linear", "linear"]
