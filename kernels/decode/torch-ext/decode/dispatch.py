"""Decides where Torch's own operations compute a result: derivatives and autocast."""

from __future__ import annotations

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


refuse_cpu("linear", "gated_linear", "attention", "cached_attention")
