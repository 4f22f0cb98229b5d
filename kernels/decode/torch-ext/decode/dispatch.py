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


def require(condition: bool, message: str) -> None:
    """Raise an error as those of the ops, unless the condition holds. For fakes."""
    if not condition:
        raise RuntimeError(f"decode: {message}")


def check_type(tensor: torch.Tensor, name: str) -> None:
    """Check the dtype of the tensor that determines those of the others."""
    types = (torch.float32, torch.float16, torch.bfloat16)
    require(tensor.dtype in types, f"{name} must be float32, float16 or bfloat16")


def check_with(tensor: torch.Tensor, name: str, first: torch.Tensor, first_name: str) -> None:
    """Check the device and the dtype of a tensor."""
    require(tensor.device == first.device, f"{name} must be on the device of {first_name}")
    require(tensor.dtype == first.dtype, f"{name} must have the dtype of {first_name}")


refuse_cpu("linear", "gated_linear", "attention", "cached_attention")
