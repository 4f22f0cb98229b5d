"""Tables of the kernels, made once of each table of a model."""

from itertools import accumulate
from typing import Optional

import torch
from torch import Tensor

from .kernel_set import is_capturing, is_forward_mode, is_transformed

Tables = tuple[Tensor, Tensor]

# An attribute of a table of cosines: the table of sines, the versions of both, and what was made of them.
_HALVES = "_blocks_halves"
# An attribute of a table of complex rotations: its cosines and sines.
_PARTS = "_blocks_parts"


def _are_temporary() -> bool:
    """Return whether tables made now cannot be kept: a CUDA graph has their memory, or a transform wraps them."""
    return is_capturing() or is_forward_mode() or is_transformed()


def _versions(cos: Tensor, sin: Tensor) -> Optional[tuple[int, int]]:
    return None if cos.is_inference() or sin.is_inference() else (cos._version, sin._version)


def _half(table: Tensor) -> Tensor:
    if table.dim() > 2 and table.stride(0) == 0:  # the same for all sequences
        table = table[:1]
    return _without_heads(table)[..., ::2].contiguous()


def _without_heads(table: Tensor) -> Tensor:
    return table.flatten(1, 2) if table.dim() == 4 else table


def halves(cos: Tensor, sin: Tensor, more: int, counts: list[int]) -> list[Tables]:
    """Return tables for the kernels, of half the width if they may be kept, for parts of some numbers of tokens.

    Args:
        cos: `[tokens, n]`, `[batch, tokens, n]`, `[1, tokens, 1, n]` or `[1, 1, tokens, n]`.
        sin: Of the shape of `cos`.
        more: The number of tokens not to rotate, which follow the others.
        counts: The numbers of tokens of the parts, those not to rotate included.
    """
    versions, made = _versions(cos, sin), vars(cos).get(_HALVES)
    if made is None or made[0] is not sin or made[1] != versions:
        if versions is None or cos.requires_grad or sin.requires_grad or _are_temporary():
            return parted(_followed_by(more, _without_heads(cos), _without_heads(sin)), counts)
        with torch.inference_mode(False), torch.no_grad():
            made = sin, versions, {None: (_half(cos), _half(sin))}
        setattr(cos, _HALVES, made)
    key = more, *counts
    tables = made[2].get(key)
    if tables is None:
        with torch.inference_mode(False), torch.no_grad():
            tables = parted(_followed_by(more, *made[2][None]), counts)
        if not _are_temporary():
            made[2][key] = tables
    return tables


def _followed_by(more: int, cos: Tensor, sin: Tensor) -> Tables:
    if not more:
        return cos, sin
    shape = (*cos.shape[:-2], more, cos.shape[-1])
    return torch.cat((cos, cos.new_ones(shape)), -2), torch.cat((sin, sin.new_zeros(shape)), -2)


def parted(tables: Tables, counts: list[int]) -> list[Tables]:
    """Return the tables of parts of some numbers of tokens."""
    if len(counts) == 1:
        return [tables]
    begins = accumulate(counts, initial=0)
    return [tuple(table.narrow(-2, begin, count) for table in tables) for begin, count in zip(begins, counts)]


def parts(rotations: Tensor) -> Tables:
    """Return the cosines and sines, one for each pair, of complex rotations. Makes them once for each tensor."""
    tables = getattr(rotations, _PARTS, None)
    if tables is None:
        with torch.inference_mode(False), torch.no_grad():
            tables = rotations.real.contiguous(), rotations.imag.contiguous()
        if not _are_temporary():
            setattr(rotations, _PARTS, tables)
    return tables
