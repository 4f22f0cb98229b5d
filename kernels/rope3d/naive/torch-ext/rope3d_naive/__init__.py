"""The naive kernel of `rope3d`, forward: see rope3d.cu."""

from torch import Tensor

from ._ops import ops


def rope3d(q: Tensor, k: Tensor, grid: "tuple[int, int, int]", theta: float = 10000.0) -> "tuple[Tensor, Tensor]":
    """Rotate q and k, `[batch, tokens, heads, elements]`, by the positions of their tokens on the grid."""
    return ops.rope3d(q, *grid, theta), ops.rope3d(k, *grid, theta)


__all__ = ["rope3d"]
