"""Decides where Torch's own operations compute a result: derivatives and autocast."""

from __future__ import annotations

import torch
from torch import is_autocast_enabled, is_grad_enabled

from ._ops import add_op_namespace_prefix
from .derivatives import is_forward_mode
from .devices import refuse_cpu

# The device type of the package's tensors.
DEVICE = "cuda" if "_cuda_" in add_op_namespace_prefix("") else "cpu"


def is_for_torch(*tensors: torch.Tensor | None) -> bool:
    """Return whether autocast or forward-mode differentiation is on, or a tensor needs a gradient."""
    if is_autocast_enabled(DEVICE) or is_forward_mode():
        return True
    return is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


_TENSOR_CORES: dict[torch.device, bool] = {}  # of each device, whether they take bfloat16


@torch.compiler.assume_constant_result
def _tensor_cores(device: torch.device) -> bool:
    if device not in _TENSOR_CORES:
        _TENSOR_CORES[device] = torch.cuda.get_device_capability(device) >= (8, 0)
    return _TENSOR_CORES[device]


def has_tensor_cores(x: torch.Tensor) -> bool:
    """Return whether the kernels on tensor cores serve the device and the dtype of a tensor."""
    # The ops themselves refuse tensors on another device.
    return not (x.is_cuda and DEVICE == "cuda") or (x.dtype != torch.float32 and _tensor_cores(x.device))


refuse_cpu("linear", "gated_linear", "attention", "cached_attention")
