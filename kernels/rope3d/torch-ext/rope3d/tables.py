"""The cosines and sines of axes: made in float64, rounded to float32 once, and kept between calls."""

import math
from collections.abc import Sequence
from typing import Optional, Union

import torch

# A number for all axes, or one for each.
PerAxis = Union[float, Sequence[float]]
# What `torch.as_tensor` takes, for each axis.
Positions = Sequence[Union[torch.Tensor, Sequence[float]]]
Tables = tuple[list[torch.Tensor], list[torch.Tensor]]

AXES = 3
_MOST_KEPT = 64
_kept: dict[object, Tables] = {}


def _each(value: PerAxis, name: str) -> tuple[float, ...]:
    if isinstance(value, (int, float)):
        return (value,) * AXES
    if len(value) != AXES:
        raise ValueError(f"rope3d: {name} must be one number or {AXES}, not {len(value)}")
    return tuple(value)


def _widths(width: int, widths: Optional[Sequence[int]]) -> tuple[int, ...]:
    if widths is None:
        sixth = width // 6
        return width - 4 * sixth, 2 * sixth, 2 * sixth
    if len(widths) != AXES or any(w % 2 != 0 or w < 0 for w in widths) or sum(widths) > width:
        raise ValueError(f"rope3d: widths must be {AXES} even numbers of at most {width} in sum, not {list(widths)}")
    return tuple(widths)


def _frequencies(
    width: int, widths: Optional[Sequence[int]], order: str, theta: PerAxis, device: torch.device
) -> list[torch.Tensor]:
    thetas = _each(theta, "theta")
    if order == "in_turn":
        steps = torch.linspace(0, 1, width // (2 * AXES), dtype=torch.float64, device=device)
        return [math.pi / 2 * t**steps for t in thetas]
    frequencies = []
    for w, t in zip(_widths(width, widths), thetas):
        pairs = torch.arange(w // 2, dtype=torch.float64, device=device)
        frequencies.append(t ** (pairs * (-2 / w if w else 0.0)))
    return frequencies


def _made(
    grid: Optional[Sequence[int]],
    positions: Optional[Positions],
    width: int,
    widths: Optional[Sequence[int]],
    order: str,
    theta: PerAxis,
    scale: PerAxis,
    offset: PerAxis,
    device: torch.device,
) -> Tables:
    if grid is not None and len(grid) != AXES:
        raise ValueError(f"rope3d: grid must have {AXES} sizes, not {len(grid)}")
    frequencies = _frequencies(width, widths, order, theta, device)
    if positions is None:
        axes = [torch.arange(size, dtype=torch.float64, device=device) for size in grid]
    else:
        if len(positions) != AXES:
            raise ValueError(f"rope3d: positions must be given for {AXES} axes, not {len(positions)}")
        axes = [torch.as_tensor(p, dtype=torch.float64, device=device) for p in positions]
        if grid is not None and any(axis.shape != (size,) for axis, size in zip(axes, grid)):
            raise ValueError("rope3d: positions must be as many as grid has on each axis")
    angles = [
        (axis * s + o)[..., None] * f
        for axis, s, o, f in zip(axes, _each(scale, "scale"), _each(offset, "offset"), frequencies)
    ]
    if grid is None:
        # Every token has positions of its own: one table, in the order of the pairs.
        if order == "in_turn":
            staying = (width - 2 * AXES * (width // (2 * AXES))) // 2
            turning = torch.stack(angles, -1).flatten(-2)
            angles = [torch.nn.functional.pad(turning, (staying, 0))]
        else:
            angles = [torch.cat(angles, -1)]
    return [a.cos().float() for a in angles], [a.sin().float() for a in angles]


def _frozen(value: object) -> object:
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value


def tables(
    grid: Optional[Sequence[int]],
    positions: Optional[Positions],
    width: int,
    widths: Optional[Sequence[int]],
    order: str,
    theta: PerAxis,
    scale: PerAxis,
    offset: PerAxis,
    device: torch.device,
) -> Tables:
    """Returns the cosines and the sines, float32 `[positions, pairs]`: of each axis of `grid`, or, without one, of all
    axes side by side as `[tokens, pairs]` or `[batch, tokens, pairs]`.

    Tables of numbers are kept. Tables of tensors are made again for every call, since tensors change.

    Raises:
        ValueError: If an argument has a wrong length or width; the message names it.
    """
    arguments = (grid, positions, width, widths, order, theta, scale, offset)
    given = positions is not None and any(isinstance(p, torch.Tensor) for p in positions)
    if given or torch.compiler.is_compiling():
        return _made(*arguments, device)
    key = (*arguments, device)
    try:
        found = _kept.get(key)
    except TypeError:  # lists among them
        key = _frozen(key)
        found = _kept.get(key)
    if found is not None:
        return found
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # What a graph makes is not there before it runs.
        return _made(*arguments, device)
    with torch.inference_mode(False), torch.no_grad():
        # Made on the host, since this copy waits, so that the tables are there for every stream.
        cos, sin = ([t.to(device) for t in side] for side in _made(*arguments, torch.device("cpu")))
    if type(cos[0]) is torch.Tensor and device.type != "meta":  # none of a tracer's
        if len(_kept) == _MOST_KEPT:
            _kept.clear()
        _kept[key] = cos, sin
    return cos, sin
