"""Time calls on tensors that are not in a cache.

A second call on the same tensors finds them in the cache and looks faster than any call in a model. Here the calls of a
series cycle through several sets of tensors and write to memory of their own; together the sets are four times as large
as the last-level cache.
"""

from __future__ import annotations

import itertools
import math
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

Call = Callable[[], Any]
Run = Callable[[], float]
"""Runs a series of calls and returns the seconds that one call took."""

_cuda: Any = torch.cuda  # only some releases have types

_TIMES_THE_CACHE = 4
_HOST_CALLS = 300
MOST_SETS = 512
"""With small tensors, even this many sets fit into the cache; then a series uses each once, after a flush."""


def sets_needed(cache: int, moved: int) -> int:
    """Return how many sets of tensors a series needs, at least 2 and at most `MOST_SETS`.

    Args:
        cache: Bytes of the last-level cache.
        moved: Bytes that one call reads and writes.
    """
    return min(max(2, math.ceil(_TIMES_THE_CACHE * cache / max(moved, 1)) + 1), MOST_SETS)


def interleaved(runs: Mapping[str, Run], rounds: int) -> dict[str, list[float]]:
    """Return one sample (seconds of a call) for each run and round.

    Each round starts with another run, so that a drift, for example of the clock frequency, affects all alike.
    """
    names = list(runs)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for run in runs.values():
        run()
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            taken[name].append(runs[name]())
    return taken


class CudaClock:
    """Replays CUDA graphs: device time without host overhead."""

    _SECONDS = 2e-3  # of one replay, long enough to make the start of a graph negligible
    _FLUSHES = 16  # about 1 ms on an H100, during which the host launches the timed call

    def __init__(self) -> None:
        self.cache = _cuda.get_device_properties(None).L2_cache_size
        self._stream = _cuda.Stream()
        self._other = torch.zeros(_TIMES_THE_CACHE * self.cache // 4, device="cuda")

    def context(self) -> AbstractContextManager[Any]:
        """Return the stream on which graphs are captured."""
        self._stream.wait_stream(_cuda.current_stream())
        return _cuda.stream(self._stream)  # type: ignore[no-any-return]

    def series(self, calls: Sequence[Call]) -> tuple[Run, str]:
        """Capture a CUDA graph. A call that cannot be captured is timed with events, after flushing the cache."""
        for call in calls[:3]:
            call()
        alone = self._events(calls[:8])
        number = max(len(calls), math.ceil(self._SECONDS / alone()))
        try:
            return self._graph(calls, min(number, MOST_SETS)), "graph"
        except RuntimeError:
            self._end_capture()
            return self._events(calls[:32]), "events"

    def _graph(self, calls: Sequence[Call], number: int) -> Run:
        # Results are kept for a whole cycle. Otherwise the allocator gives each call the memory that the previous call
        # wrote, and the cache never writes it back.
        results: deque[Any] = deque(maxlen=len(calls))
        graph = _cuda.CUDAGraph()
        with _cuda.graph(graph, stream=self._stream):
            for call in itertools.islice(itertools.cycle(calls), number):
                results.append(call())
        start, end = (_cuda.Event(enable_timing=True) for _ in range(2))

        # The graph uses the tensors of the calls, so the run keeps them alive.
        def run(kept: Sequence[Call] = calls) -> float:
            self._flush()
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) * 1e-3 / number

        return run

    def _flush(self) -> None:
        """Evict the cache by reading other memory, which needs no write-back. The host does not wait for it."""
        self._other.sum()

    @staticmethod
    def _end_capture() -> None:
        """Recover from a failed capture, after which the random generator still expects one until its state is set."""
        _cuda.synchronize()
        generator = _cuda.default_generators[_cuda.current_device()]
        generator.graphsafe_set_state(torch.Generator("cuda").graphsafe_get_state())

    def _events(self, calls: Sequence[Call]) -> Run:
        def run() -> float:
            times = []
            for call in calls:
                start, end = (_cuda.Event(enable_timing=True) for _ in range(2))
                for _ in range(self._FLUSHES):
                    self._flush()
                start.record()
                call()
                end.record()
                times.append((start, end))
            self._stream.synchronize()
            return sum(float(start.elapsed_time(end)) for start, end in times) * 1e-3 / len(times)

        return run


class CpuClock:
    """Measures wall-clock time."""

    _SECONDS = 10e-3

    def __init__(self) -> None:
        self.cache = _last_cache()

    def context(self) -> AbstractContextManager[Any]:
        """Return a context that does nothing."""
        return nullcontext()

    def series(self, calls: Sequence[Call]) -> tuple[Run, str]:
        """Time the calls by the wall clock."""
        calls[0]()
        taken = []
        for call in calls[-3:]:
            started = time.perf_counter()
            call()
            taken.append(time.perf_counter() - started)
        endless = itertools.cycle(calls)
        number = max(1, math.ceil(self._SECONDS / min(taken)))
        results: deque[Any] = deque(maxlen=len(calls))  # kept, as in a CUDA graph

        def run() -> float:
            started = time.perf_counter()
            for call in itertools.islice(endless, number):
                results.append(call())
            return (time.perf_counter() - started) / number

        return run, "wall clock"


def _last_cache() -> int:
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        if match := re.fullmatch(r"(\d+)([KMG])", path.read_text().strip()):
            sizes.append(int(match[1]) << {"K": 10, "M": 20, "G": 30}[match[2]])
    return max(sizes) or 32 << 20


def host_series(call: Call, device: str) -> Run:
    """Return a run that measures the host overhead of a call, in seconds.

    The device must finish each call sooner than the host issues the next.
    """

    def run() -> float:
        if device == "cuda":
            _cuda.synchronize()
        for _ in range(20):  # the first calls after an idle period are slower
            call()
        started = time.perf_counter()
        for _ in range(_HOST_CALLS):
            call()
        return (time.perf_counter() - started) / _HOST_CALLS

    return run


Clock = CudaClock | CpuClock
"""Times series of calls on one device.

`cache` is the number of bytes of the device's last-level cache. Tensors and graphs must be made within `context`, since
autograd records the current stream; `series` returns a run that cycles through calls, and the name of the method.
"""


def clock(device: str) -> Clock:
    """Return the clock for "cpu" or "cuda"."""
    return CudaClock() if device == "cuda" else CpuClock()
