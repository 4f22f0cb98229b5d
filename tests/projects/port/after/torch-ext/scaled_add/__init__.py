"""Scaled addition."""

import torch

from ._ops import add_op_namespace_prefix, ops


def scaled_add(a: torch.Tensor, b: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Return `a + scale * b`, of two tensors with the same shape, dtype and device."""
    return ops.scaled_add(a, b, scale)


@torch.library.register_fake(add_op_namespace_prefix("scaled_add"))
def _fake(a, b, scale=1.0):
    return a.new_empty(a.shape)


__all__ = ["scaled_add"]
