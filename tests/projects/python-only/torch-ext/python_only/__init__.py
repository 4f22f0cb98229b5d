"""Doubling in Python, for tests."""

import torch

from ._ops import add_op_namespace_prefix, ops


@torch.library.custom_op(add_op_namespace_prefix("doubled"), mutates_args=())
def _doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def doubled(x: torch.Tensor) -> torch.Tensor:
    """`2 * x`."""
    return ops.doubled(x)


__all__ = ["doubled"]
