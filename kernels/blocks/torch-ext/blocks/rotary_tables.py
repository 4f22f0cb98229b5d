"""Cosines and sines of rotary embeddings, kept between the forwards of a module that makes them anew each time."""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import accumulate
from typing import Optional

import torch
from torch import Tensor, nn

from .kernel_set import is_capturing, is_forward_mode, is_transformed

Tables = tuple[Tensor, Tensor]

_MOST_BYTES = 2**28  # for each module
# An attribute of a table of cosines: the tables of half the width that were made of it.
_HALVES = "_blocks_halves"
# An attribute of a table of complex rotations: its cosines and sines.
_PARTS = "_blocks_parts"


@dataclass
class _Kept:
    tables: Tables
    # The tensors that the tables were made of, and their versions.
    sources: tuple[tuple["weakref.ref[Tensor]", int], ...]
    bytes: int
    # A CUDA graph reads the tables, now and at any later time.
    captured: bool = False

    def is_made_of(self, sources: tuple[Tensor, ...]) -> bool:
        return all(
            reference() is source and version == source._version
            for (reference, version), source in zip(self.sources, sources)
        )


# By module, outside of it, so that neither its state nor its copies have them. The ones used last are at the end.
_kept: "weakref.WeakKeyDictionary[nn.Module, OrderedDict[Hashable, _Kept]]" = weakref.WeakKeyDictionary()
_changing = threading.Lock()


def keep_tables(
    module: nn.Module,
    key: Hashable,
    make: Callable[[], Tables],
    *sources: Tensor,
    prepare: Optional[Callable[[Tensor, Tensor], Tables]] = None,
) -> Tables:
    """Return the tables that `make` returns, or those that it returned before for the same module, key and sources.

    Args:
        module: The module that makes the tables. At most 256 MiB are kept for it, the ones used last.
        key: Everything else that the tables depend on but `sources`: sizes, frequencies, device.
        make: Returns cosines and sines, both with the same value at both elements of a pair.
        sources: Tensors that the tables are made of.
        prepare: Called with what `make` returns: `with_parts` for complex rotations. Default: `with_halves`.
    """
    prepare = prepare or with_halves
    if any(source.is_inference() for source in sources):  # has no version
        return prepare(*make())
    capturing = is_capturing()
    with _changing:
        kept = _kept.setdefault(module, OrderedDict())
        entry = kept.get(key)
        if entry is not None and entry.is_made_of(sources):
            kept.move_to_end(key)
            entry.captured = entry.captured or capturing
            return entry.tables
    if _are_temporary():
        return prepare(*make())
    # In inference mode the tables would be of no use to a later forward with gradients.
    with torch.inference_mode(False), torch.no_grad():
        tables = prepare(*make())
    cos = tables[0]
    if type(cos) is Tensor:  # not a fake tensor
        if cos.device.type == "cuda":
            # Other streams may read the new tables, and may be reading those that go.
            torch.cuda.synchronize(cos.device)
        made_of = tuple((weakref.ref(source), source._version) for source in sources)
        with _changing:
            _keep(kept, key, _Kept(tables, made_of, 3 * cos.untyped_storage().nbytes()))
    return tables


def _are_temporary() -> bool:
    """Return whether tables made now cannot be kept: a CUDA graph has their memory, or a transform wraps them."""
    return is_capturing() or is_forward_mode() or is_transformed()


def _keep(kept: "OrderedDict[Hashable, _Kept]", key: Hashable, new: _Kept) -> None:
    if key in kept and not kept[key].captured:
        del kept[key]
    free = _MOST_BYTES - sum(entry.bytes for entry in kept.values())
    removable = [other for other, entry in kept.items() if not entry.captured]
    while new.bytes > free and removable:
        free += kept.pop(removable.pop(0)).bytes
    if new.bytes <= free and key not in kept:
        kept[key] = new


def with_halves(cos: Tensor, sin: Tensor) -> Tables:
    """Return `cos, sin`, for which `halves` now finds tables of half the width, with one entry for each pair."""
    with torch.inference_mode(False), torch.no_grad():
        setattr(cos, _HALVES, (sin, _versions(cos, sin), {None: (_half(cos), _half(sin))}))
    return cos, sin


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
        with_halves(cos, sin)
        made = vars(cos)[_HALVES]
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


def with_parts(first: Tensor, second: Tensor) -> Tables:
    """Return two tables of complex rotations, for which `parts` now finds cosines and sines."""
    for rotations in (first, second):
        setattr(rotations, _PARTS, _parts(rotations))
    return first, second


def _parts(rotations: Tensor) -> Tables:
    return rotations.real.contiguous(), rotations.imag.contiguous()


def parts(rotations: Tensor) -> Tables:
    """Return the cosines and sines, one for each pair, of complex rotations. Makes them once for each tensor."""
    tables = getattr(rotations, _PARTS, None)
    if tables is None:
        with torch.inference_mode(False), torch.no_grad():
            tables = _parts(rotations)
        if not _are_temporary():
            setattr(rotations, _PARTS, tables)
    return tables
