"""Tables of cosines and sines: computed in float64, rounded to float32 once, and kept between calls."""

import math
import threading
from collections.abc import Sequence
from typing import Optional, Union

import torch

# One number for all axes, or one for each axis.
PerAxis = Union[float, Sequence[float]]
# One for each axis.
Positions = Sequence[Union[torch.Tensor, Sequence[float]]]

AXES = 3
ORDERS = ("contiguous", "sections", "in_turn")
# If the pairs of an axis are adjacent, the first entry of its rows belongs to a pair that is a multiple of this, so
# that the kernel can use vectorized loads.
_ALIGNED = 8


def each(value: PerAxis, name: str) -> tuple[float, ...]:
    """Return one number for each axis.

    Raises:
        ValueError: If `value` is a sequence of another length.
    """
    if isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        return (value,) * AXES
    if len(value) != AXES:
        raise ValueError(f"rope3d: {name} must be one number or {AXES}, not {len(value)}")
    return tuple(value)


def pairs_of_axes(dim: int, widths: Optional[Sequence[int]], order: str) -> tuple[int, ...]:
    """Return the number of pairs that each axis rotates, for a head of `dim` elements.

    Raises:
        ValueError: If `order` has another value, or if `widths` do not fit.
    """
    if order not in ORDERS:
        raise ValueError(f"rope3d: order must be one of {', '.join(map(repr, ORDERS))}, not {order!r}")
    sixth = dim // (2 * AXES)
    if widths is None:
        return sixth if order == "in_turn" else dim // 2 - 2 * sixth, sixth, sixth
    if order == "in_turn":
        raise ValueError('rope3d: widths must be None with the order "in_turn", whose axes have equal parts of a head')
    if len(widths) != AXES or any(w % 2 != 0 or w < 0 for w in widths) or sum(widths) > dim:
        raise ValueError(f"rope3d: widths must be {AXES} even numbers of at most {dim} in sum, not {list(widths)}")
    return tuple(w // 2 for w in widths)


def _angles(
    axes: Sequence[torch.Tensor], pairs: Sequence[int], order: str, theta: PerAxis, scale: PerAxis, offset: PerAxis
) -> list[torch.Tensor]:
    """Return the float64 angles `[..., pairs]` of each axis, whose indexes `axes` may have any shape."""
    angles, begin = [], 0
    for indexes, n, t, s, o in zip(axes, pairs, each(theta, "theta"), each(scale, "scale"), each(offset, "offset")):
        steps = torch.arange(n, dtype=torch.float64, device=indexes.device)
        if order == "in_turn":
            frequencies = math.pi / 2 * t ** torch.linspace(0, 1, n, dtype=torch.float64, device=indexes.device)
        elif order == "sections":
            frequencies = t ** ((begin + steps) * (-1 / max(sum(pairs), 1)))
        else:
            frequencies = t ** (steps * (-1 / n if n else 0.0))
        angles.append((indexes * s + o)[..., None] * frequencies)
        begin += n
    return angles


def rows_of(pairs: Sequence[int], in_turn: bool) -> tuple[list[int], int]:
    """Return the entry at which the pairs of each axis start in its rows, and the number of entries of a row."""
    begin, entries, starts = 0, 0, []
    multiple = 2 if in_turn else _ALIGNED
    for n in pairs:
        # The entries before the first pair of an axis are zero.
        starts.append(0 if in_turn else begin % _ALIGNED)
        entries = max(entries, (starts[-1] + n + multiple - 1) // multiple * multiple)
        begin += n
    return starts, entries


def grid_table(
    axes: Sequence[torch.Tensor], pairs: Sequence[int], order: str, theta: PerAxis, scale: PerAxis, offset: PerAxis
) -> torch.Tensor:
    """Return the table of a grid: float32 `[rows, entries, 2]`, cosine and sine.

    There is one row for each position of the first axis, then of the second, then of the third.
    """
    starts, entries = rows_of(pairs, order == "in_turn")
    rows = []
    for angles, start, n in zip(_angles(axes, pairs, order, theta, scale, offset), starts, pairs):
        values = torch.stack((angles.cos(), angles.sin()), -1).float()
        rows.append(torch.nn.functional.pad(values, (0, 0, start, entries - start - n)))
    return torch.cat(rows)


def token_tables(
    axes: Sequence[torch.Tensor],
    dim: int,
    pairs: Sequence[int],
    order: str,
    theta: PerAxis,
    scale: PerAxis,
    offset: PerAxis,
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return the cosines and sines of tokens at the positions `axes`, and the number of elements that they rotate.

    Both are float32 `[..., n]`.
    """
    angles = _angles(axes, pairs, order, theta, scale, offset)
    if order == "in_turn":
        # The elements left over come first, with zero angles.
        rotated = torch.nn.functional.pad(torch.stack(angles, -1).flatten(-2), (dim // 2 - sum(pairs), 0))
    else:
        rotated = torch.cat(angles, -1)
    return rotated.cos().float(), rotated.sin().float(), 2 * rotated.shape[-1]


class Kept:
    """Keeps tables for later calls, in `entries`: `((table,), options)` by the arguments that determine them.

    Tables are never freed, because a CUDA graph, or a kernel on any stream, may read one at any later time. None is
    added that would bring them above `most_bytes` together. Threads may read `entries` while one of them calls `keep`.
    """

    def __init__(self, most_bytes: int) -> None:
        self.entries: dict[object, tuple] = {}
        self._free_bytes = most_bytes
        self._changing = threading.Lock()

    def keep(self, key: object, table: torch.Tensor, options: object = None) -> Optional[tuple]:
        """Keep a table if there is room and `key` is new. Return the entry of `key`, or None."""
        with self._changing:
            # A mode such as FakeTensorMode makes tensors that are of no use outside of it.
            if key not in self.entries and type(table) is torch.Tensor and table.nbytes <= self._free_bytes:
                self.entries[key] = ((table,), options)
                self._free_bytes -= table.nbytes
            return self.entries.get(key)
