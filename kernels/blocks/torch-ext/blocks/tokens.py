"""The tokens of two streams."""

import torch
from torch import Tensor

from .kernel_set import share_memory


def joined_tokens(first: Tensor, second: Tensor) -> Tensor:
    """Return `torch.cat((first, second), dim=1)`, without a copy of two parts of one tensor, as blocks return them."""
    if first.dim() != 3 or second.dim() != 3 or torch.is_grad_enabled():
        return torch.cat((first, second), dim=1)
    batch, tokens, channels = first.shape
    both = tokens + second.shape[1]
    if (
        first.dtype == second.dtype
        and second.shape[::2] == (batch, channels)
        and first.stride() == second.stride() == (both * channels, channels, 1)
        and second.storage_offset() == first.storage_offset() + tokens * channels
        and share_memory(first, second)
    ):
        return first.as_strided((batch, both, channels), first.stride())
    return torch.cat((first, second), dim=1)
