"""Decides where Torch's own operations compute a result: derivatives, autocast and vmap."""

from __future__ import annotations

from typing import Callable

import torch
from torch import is_grad_enabled

from ._ops import add_op_namespace_prefix
from .derivatives import is_forward_mode
from .devices import refuse_cpu

# The device type of the package's tensors.
DEVICE = "cuda" if "_cuda_" in add_op_namespace_prefix("") else "cpu"


def need_derivative(*tensors: torch.Tensor | None) -> bool:
    """Return whether forward-mode differentiation is on, or a tensor needs a gradient."""
    return is_forward_mode() or (
        is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
    )


def vmap_by_torch(op: str, by_torch: Callable[..., torch.Tensor]) -> None:
    """Let `torch.vmap` of an op call `by_torch`, which takes the same arguments, for each element of the batch."""

    def rule(info, in_dims, *arguments):
        def call(index):
            return by_torch(*(a if dim is None else a.select(dim, index) for a, dim in zip(arguments, in_dims)))

        return torch.stack([call(index) for index in range(info.batch_size)]), 0

    torch.library.register_vmap(add_op_namespace_prefix(op), rule)


refuse_cpu("linear", "gated_linear", "attention", "cached_attention")
