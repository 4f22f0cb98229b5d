"""Nearest neighbours of float32 points on the CPU, without a backward pass."""

import torch

from ._ops import add_op_namespace_prefix, ops


@torch.library.register_fake(add_op_namespace_prefix("nearest"))
def _fake(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0])


def nearest(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the square of the distance of each point `x[i]` to the nearest `y[j]`."""
    return ops.nearest(x, y)


__all__ = ["nearest"]
