"""Whether results are correct: their error against float64, beside eager PyTorch's, and memory left unwritten.

A result of `torch.empty` has the content of memory that was freed before, which may be the reference's own result. So
allocations are filled before a kernel gets them.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from kernel_builder.measure.results import Deviation
from kernel_builder.plural import counted

# Half a unit in the last place of float32: results this close differ by the rounding of the libraries alone.
_SLACK = 2.0**-24
# A single element may be this many units in the last place worse than eager's worst element: which of two correct
# roundings hits the worst element is chance.
_SLACK_ULPS = 0.5


def deviation(result: torch.Tensor, exact: torch.Tensor) -> Deviation:
    """Return how far `result` is from `exact`.

    Args:
        result: The result under test, of any shape and dtype.
        exact: The same result computed in float64, of the same shape. Integers and booleans stay.

    Returns:
        Infinite values if the shapes differ, or if `result` is not finite where `exact` is.
    """
    if result.shape != exact.shape:
        return Deviation(math.inf, math.inf)
    if result.numel() == 0:
        return Deviation(0.0, 0.0)
    exact = exact.double()
    difference = result.double() - exact
    norm, largest = exact.norm().item(), exact.abs().max().item()
    error_norm, largest_error = difference.norm().item(), difference.abs().max().item()
    if not (math.isfinite(error_norm) and math.isfinite(largest_error)):
        return Deviation(math.inf, math.inf)
    tiny = torch.finfo(torch.float64).tiny
    eps = torch.finfo(result.dtype).eps if result.is_floating_point() else 1.0
    return Deviation(relative=error_norm / max(norm, tiny), ulps=largest_error / max(largest, tiny) / eps)


def fault(ours: Sequence[Deviation], eager: Sequence[Deviation], factor: float) -> str | None:
    """Return why results are not accurate enough, or None if they are.

    `ours` and `eager` have the deviation of each result.
    """
    if len(ours) != len(eager):
        return f"it has {counted(len(ours), 'result')}, expected {len(eager)}"
    for number, (result, allowed) in enumerate(zip(ours, eager, strict=True), 1):
        which = "its error" if len(ours) == 1 else f"the error of result {number}"
        for error, of_eager, slack, unit in (
            (result.relative, allowed.relative, _SLACK, "relative to its norm"),
            (result.ulps, allowed.ulps, _SLACK_ULPS, "ulps at the worst element"),
        ):
            if not error <= (most := factor * of_eager + slack):
                return f"{which} is {error:.2g} {unit}, and {most:.2g} is allowed (eager PyTorch: {of_eager:.2g})"
    return None


POISON = 0x7F
"""The byte that fills memory. As float32 and bfloat16 it is 3.4e38, as float16 not a number, as an integer large."""

_M_PERTURB = -6  # of mallopt, in glibc's <malloc.h>
_BLOCKS = 4  # of each size, for a kernel that allocates several
_LARGE = 1 << 30


@contextmanager
def poisoned(device: str, sizes: Iterable[int] = ()) -> Iterator[None]:
    """Fill the memory that is allocated in this context, or that was freed before it, with `POISON`.

    On the CPU, glibc fills all that `malloc` returns, except for blocks of up to 1 KB that the same thread has freed.
    On a GPU, the free blocks of Torch's allocator are filled that fit the sizes.

    Args:
        device: "cpu" or "cuda".
        sizes: Bytes of the tensors that the kernel is expected to allocate; used on a GPU only.
    """
    if device != "cpu":
        held = [
            torch.full((size,), POISON, dtype=torch.uint8, device=device)
            for size in sizes
            for _ in range(_BLOCKS if size < _LARGE else 1)
        ]
        del held
        yield
        return
    libc = ctypes.CDLL(None)
    try:
        libc.mallopt(_M_PERTURB, POISON ^ 0xFF)  # glibc fills with the complement
        yield
    finally:
        libc.mallopt(_M_PERTURB, 0)
