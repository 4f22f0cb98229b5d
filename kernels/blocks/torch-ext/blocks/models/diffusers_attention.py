"""What the attention modules of diffusers have in common."""

import sys
from types import ModuleType
from typing import Optional

import torch
from torch import Tensor, nn

from ..replacements import is_own, original_class, path_of


def library_of(module: nn.Module) -> ModuleType:
    """Return the Python module that defines the class of `module`, to take the library's own functions from it."""
    return sys.modules[original_class(module).__module__]


def diffusers_norms() -> ModuleType:
    """Return `diffusers.models.normalization`. Its classes may be asked for only where one of their modules exists."""
    return sys.modules["diffusers.models.normalization"]


def norms_mismatch(path: str, *norms: nn.Module) -> Optional[str]:
    """Return why q and k norms cannot be computed together: another class, no weight, or different or no eps."""
    for norm in norms:
        if path_of(original_class(norm)) != path:
            return f"its q and k norms are of another class than {path}"
        if norm.weight is None or norm.weight.dim() != 1 or getattr(norm, "bias", None) is not None:
            return "its q and k norms have no weight, or a bias, or normalize over several dimensions"
        if not isinstance(norm.eps, float) or norm.eps != norms[0].eps:
            return "its q and k norms have no eps, or two"
    return None


def are_own_norms(cls: type, dtype: torch.dtype, *norms: nn.Module) -> bool:
    """Return whether kernels may read the weights of q and k norms, and the result has the dtype of their input."""
    for norm in norms:  # noqa: SIM110 - `all` over a generator costs the host twice as much
        if not (is_own(norm, cls) and norm.weight.dtype == dtype):
            return False
    return True


def heads_of(x: Tensor, heads: int) -> Tensor:
    """Return `[batch, tokens, heads, elements]` of `[batch, tokens, heads * elements]`."""
    return x.unflatten(2, (heads, -1))
