"""Cosines and sines of rotary embeddings, kept between the forwards of a model that makes them anew each time."""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from .kernel_set import DEVICE

Tables = tuple[Tensor, Tensor]

_MOST_BYTES = 2**29
# On a table of cosines: the tables in half of its width that belong to it.
_HALVES = "_blocks_halves"


@dataclass
class _Kept:
    tables: Tables
    # The tensors that the tables were made of, and their versions.
    sources: tuple[tuple["weakref.ref[Tensor]", int], ...]
    bytes: int
    # A CUDA graph reads the tables, now and at any later time.
    captured: bool = False

    def is_of(self, sources: tuple[Tensor, ...]) -> bool:
        return all(
            reference() is source and version == source._version
            for (reference, version), source in zip(self.sources, sources)
        )


_kept: "OrderedDict[Hashable, _Kept]" = OrderedDict()  # the one used last is at the end
_changing = threading.Lock()


def keep_tables(key: Hashable, make: Callable[[], Tables], *sources: Tensor) -> Tables:
    """Return the tables that `make` returns, or those that it returned for the same key and sources before.

    Args:
        key: Everything that the tables depend on but `sources`: sizes, frequencies, device.
        make: Returns cosines and sines, both with the same value at both elements of a pair.
        sources: Tensors that the tables are made of.

    The tables kept have 512 MiB at most, with their halves; the ones not used for the longest time go first.
    """
    if any(source.is_inference() for source in sources):  # has no version
        return with_halves(*make())
    key = key, *map(id, sources)
    capturing = _is_capturing()
    with _changing:
        found = _kept.get(key)
        if found is not None and found.is_of(sources):
            _kept.move_to_end(key)
            found.captured = found.captured or capturing
            return found.tables
        if found is not None and not found.captured:
            del _kept[key]
    if capturing:  # the memory belongs to the graph
        return with_halves(*make())
    # In inference mode the tables would be of no use to a later forward with gradients.
    with torch.inference_mode(False), torch.no_grad():
        cos, sin = with_halves(*make())
    if type(cos) is Tensor:  # not a fake tensor
        _keep(
            key,
            _Kept((cos, sin), tuple((weakref.ref(s), s._version) for s in sources), 3 * cos.untyped_storage().nbytes()),
        )
    return cos, sin


def _keep(key: Hashable, new: _Kept) -> None:
    device = new.tables[0].device
    if device.type == "cuda":
        # Other streams may read the new tables, and may be reading the ones that go.
        torch.cuda.synchronize(device)
    with _changing:
        free = _MOST_BYTES - sum(kept.bytes for kept in _kept.values())
        removable = [key for key, kept in _kept.items() if not kept.captured]
        while new.bytes > free and removable:
            free += _kept.pop(removable.pop(0)).bytes
        if new.bytes <= free and key not in _kept:
            _kept[key] = new


def _is_capturing() -> bool:
    return DEVICE == "cuda" and torch.cuda.is_current_stream_capturing()


def with_halves(cos: Tensor, sin: Tensor) -> Tables:
    """Make tables in half of the width, with one entry for each pair, for `halves` to find. Return `cos, sin`."""
    setattr(cos, _HALVES, (sin, {0: (_half(cos), _half(sin))}))
    return cos, sin


def _half(table: Tensor) -> Tensor:
    if table.stride(0) == 0:  # the same for all sequences
        table = table[:1]
    return (table.flatten(1, 2) if table.dim() == 4 else table)[..., ::2].contiguous()


def halves(cos: Tensor, sin: Tensor, more: int = 0) -> Tables:
    """Return the tables for the kernels: of half the width, if they were made, followed by `more` tokens not to rotate.

    Args:
        cos: `[tokens, n]` or `[batch, tokens, n]`, or `[1, tokens, 1, n]`.
        sin: Of the shape of `cos`.
    """
    of, found = getattr(cos, _HALVES, (None, None))
    if of is sin and more in found:
        return found[more]
    half_cos, half_sin = found[0] if of is sin else (cos, sin)
    if half_cos.dim() == 4:
        half_cos, half_sin = half_cos.flatten(1, 2), half_sin.flatten(1, 2)
    if more > 0:
        shape = (*half_cos.shape[:-2], more, half_cos.shape[-1])
        half_cos = torch.cat((half_cos, half_cos.new_ones(shape)), -2)
        half_sin = torch.cat((half_sin, half_sin.new_zeros(shape)), -2)
    if of is sin and not _is_capturing():
        found[more] = half_cos, half_sin
    return half_cos, half_sin
