"""The tables of a grid's axes: made in float64, rounded to float32 once, and kept between calls."""

import math
import threading
from collections.abc import Sequence
from typing import Callable, Optional, Union

import torch

# A number for all axes, or one for each.
PerAxis = Union[float, Sequence[float]]
# What `torch.as_tensor` takes, for each axis.
Positions = Sequence[Union[torch.Tensor, Sequence[float]]]

AXES = 3
ORDERS = ("contiguous", "sections", "in_turn")
# Where axes follow one another, the first entry of a row belongs to a pair that is a multiple of this, as it must be
# for the kernel to read entries in vectors.
_ALIGNED = 8


def each(value: PerAxis, name: str) -> tuple[float, ...]:
    """Returns a number for each axis.

    Raises:
        ValueError: If there are not as many as axes.
    """
    if isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        return (value,) * AXES
    if len(value) != AXES:
        raise ValueError(f"rope3d: {name} must be one number or {AXES}, not {len(value)}")
    return tuple(value)


def pairs_of_axes(dim: int, widths: Optional[Sequence[int]], order: str) -> tuple[int, ...]:
    """Returns how many pairs of a head of `dim` elements turn by each axis.

    Raises:
        ValueError: If there is no such order, or if `widths` do not fit.
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
    """The angles `[..., pairs]` of each axis, in float64, where `axes` has indexes of any shape."""
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
    """Returns at which entry of its rows the pairs of each axis start, and how many entries a row has."""
    begin, entries, starts = 0, 0, []
    multiple = 2 if in_turn else _ALIGNED
    for n in pairs:
        # Entries before the first pair of an axis, in whose place others have theirs, are zero.
        starts.append(0 if in_turn else begin % _ALIGNED)
        entries = max(entries, (starts[-1] + n + multiple - 1) // multiple * multiple)
        begin += n
    return starts, entries


def grid_table(
    axes: Sequence[torch.Tensor], pairs: Sequence[int], order: str, theta: PerAxis, scale: PerAxis, offset: PerAxis
) -> torch.Tensor:
    """Returns the table of a grid as the kernel reads it: float32 `[rows, entries, 2]`, cosine and sine, a row for each
    of the positions `axes` of the first axis, then of the second, then of the third.
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
    """Returns the cosines and sines, float32 `[..., n]`, of tokens whose positions `axes` has, and how many elements of
    a head they turn."""
    angles = _angles(axes, pairs, order, theta, scale, offset)
    if order == "in_turn":
        # What stays is in front, and turns by nothing.
        turning = torch.nn.functional.pad(torch.stack(angles, -1).flatten(-2), (dim // 2 - sum(pairs), 0))
    else:
        turning = torch.cat(angles, -1)
    return turning.cos().float(), turning.sin().float(), 2 * turning.shape[-1]


class Kept:
    """Tables, each with what goes with it, by what determines them. Up to so many bytes they are kept for good, since a
    CUDA graph, or a kernel on any stream, may read a table at any later time; those beyond are not kept at all. Threads
    may read `found` while one of them calls `keep`.
    """

    def __init__(self, most_bytes: int) -> None:
        self.found: dict[object, tuple] = {}
        self._free_bytes = most_bytes
        self._changing = threading.Lock()

    def keep(
        self, key: object, table: torch.Tensor, companion: Optional[Callable[[], object]] = None
    ) -> Optional[tuple]:
        """Returns what `found` has under `key` afterwards: a table, and the result of `companion`, which is called only
        for a table that is kept. None: it is not kept."""
        with self._changing:
            if key not in self.found and table.nbytes <= self._free_bytes:
                self.found[key] = (table, companion() if companion else None)
                self._free_bytes -= table.nbytes
            return self.found.get(key)
