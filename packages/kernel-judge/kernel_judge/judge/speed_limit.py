"""The least time of a call on this device: the time of its bytes at memory speed, or of its operations at matrix speed.

Both speeds are measured beside the candidate, not taken from data sheets.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from kernel_builder.api import Clock, copies, sets_needed
from kernel_judge.judge.reference import Arguments, Reference

_LEAST_BYTES, _MOST_SETS = 4096, 64
_REST = 0.1  # of all bytes: if fewer are only read or only written, all count as copied
_MATRIX = {"cpu": 512, "cuda": 8192}
_MATRIX_DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_SAMPLES, _CPU_SECONDS = 3, 0.05


class Limit(NamedTuple):
    """The work of one call, and the device's speeds: bytes a second, and operations a second if there are any."""

    bytes: int
    operations: int
    memory_speed: float
    matrix_speed: float | None

    @property
    def seconds(self) -> float:
        """The least time of the call."""
        return max(self.bytes / self.memory_speed, self.operations / (self.matrix_speed or float("inf")))

    def raised(self, other: Limit) -> Limit:
        """Return the limit at the higher speeds of two measurements: other work on the machine only lowers them."""
        matrix = max(self.matrix_speed, other.matrix_speed) if self.matrix_speed and other.matrix_speed else None
        return self._replace(memory_speed=max(self.memory_speed, other.memory_speed), matrix_speed=matrix)

    def sol_score(self, seconds: float, baseline: float) -> float:
        """Return SOL-ExecBench's score of a time: 0.5 at the baseline's time, 1 at the limit.

        S = 1 / (1 + (T_k - T_SOL) / (T_b - T_SOL)). A time below the limit counts as the limit. Source: Lin et al.,
        "SOL-ExecBench", arXiv:2603.19173; `sol_score.py` of github.com/NVIDIA/SOL-ExecBench at 8d2237d.
        """
        over, gap = max(seconds - self.seconds, 0.0), baseline - self.seconds
        if gap <= 0:
            return 0.0 if over else 1.0
        return 1 / (1 + over / gap)


def measure_limit(reference: Reference, given: Arguments, timer: Clock) -> Limit:
    """Measure the limit of a call with these inputs."""
    read, written = reference.moved(given)
    dtypes = {tensor.dtype for tensor in (*given.tensors, *reference.state.values())} & _MATRIX_DTYPES
    operations = reference.operations if dtypes else 0
    device = reference.device
    with timer.context():
        memory = (read + written) / _memory_seconds(device, timer, read, written)
        # The narrowest dtype is the fastest.
        narrowest = min(dtypes, key=lambda dtype: dtype.itemsize, default=torch.float32)
        matrix = _matrix_speed(device, timer, narrowest) if operations else None
    return Limit(read + written, operations, memory, matrix)


def _memory_seconds(device: str, timer: Clock, read: int, written: int) -> float:
    """Return the time of copying as many bytes as are both read and written, and of reading or filling the others.

    Tensors are as large as the call's, so that a small call, whose tensors stay in the cache, has its speed.
    """
    moved = max(read + written, _LEAST_BYTES)
    sets = min(sets_needed(timer.cache, moved), _MOST_SETS)
    copied = _copy_seconds(device, timer, moved, sets) / moved
    rest = abs(read - written)
    if rest <= _REST * moved:
        return copied * (read + written)
    tensors = [torch.ones(rest // 4 + 1, device=device) for _ in range(sets)]
    one_way = [partial(torch.sum, tensor) if read > written else partial(tensor.fill_, 2.0) for tensor in tensors]
    return copied * 2 * min(read, written) + min(_seconds(device, timer, one_way), copied * rest)


def _matrix_speed(device: str, timer: Clock, dtype: torch.dtype) -> float:
    """Return the operations of matrix products in a second."""
    size = _MATRIX[device]
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    seconds = (_seconds(device, timer, [partial(torch.mm, left, matrix)]) for matrix in (right, right.t()))
    return 2 * size**3 / min(seconds)


def _copy_seconds(device: str, timer: Clock, moved: int, sets: int) -> float:
    if device != "cpu":
        run, _ = copies(moved, sets, device, timer)
        return min(run() for _ in range(_SAMPLES))
    sources = [torch.ones(moved // 2, dtype=torch.uint8) for _ in range(sets)]
    return _seconds(device, timer, [partial(torch.empty_like(source).copy_, source) for source in sources])


def _seconds(device: str, timer: Clock, calls: Sequence[Callable[[], Any]]) -> float:
    """Return the time of the fastest call: on a CPU of single ones, since other work interrupts longer series."""
    if device != "cpu":
        run, _ = timer.series(calls)
        return min(run() for _ in range(_SAMPLES))
    taken: list[float] = []
    end = time.perf_counter() + _CPU_SECONDS
    while not taken or time.perf_counter() < end:
        for call in calls:
            started = time.perf_counter()
            call()
            taken.append(time.perf_counter() - started)
    return min(taken)
