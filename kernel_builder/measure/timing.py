"""Times calls on memory that no cache holds.

The caches of a processor keep what a call has just read and written, so that a second call on the same tensors looks
faster than any call of a model. Here each call of a series works on the next of several sets of tensors, and writes to
memory of its own; together they exceed the last cache four times over.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import time
import timeit
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Protocol

import torch

Call = Callable[[], Any]
Run = Callable[[], float]
"""Runs a series of calls; returns the seconds that one of them took."""

_cuda: Any = torch.cuda  # typed in some releases only

_TIMES_THE_CACHE = 4
_HOST_CALLS = 300
MOST_SETS = 512
"""Of small tensors even as many do not fill a cache; then a series takes each of them once, after a flush."""


class Clock(Protocol):
    """Times series of calls on one device."""

    cache: int
    """Bytes of the device's last cache."""

    def here(self) -> AbstractContextManager[Any]:
        """Within it everything that calls need is made: what autograd remembers belongs to a stream."""

    def series(self, calls: Sequence[Call]) -> tuple[Run, str]:
        """How to run a series that takes the calls in turn, and in a word how it is timed. Within `here`."""


def clock(device: str) -> Clock:
    """The clock of `cpu` or `cuda`."""
    return CudaClock() if device == "cuda" else CpuClock()


def sets_needed(cache: int, moved: int) -> int:
    """How many sets of tensors calls must take in turn, each of which moves that many bytes."""
    return min(max(2, math.ceil(_TIMES_THE_CACHE * cache / max(moved, 1)) + 1), MOST_SETS)


def interleaved(runs: Mapping[str, Run], rounds: int) -> dict[str, list[float]]:
    """Seconds of a call of each, once a round.

    Each round begins with another, so that what drifts, as a clock frequency does, touches all of them alike.
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
    """Replays CUDA graphs: the device's time, without what the host needs to launch a kernel."""

    _SECONDS = 2e-3  # of one replay, beside which the start of a graph is nothing
    _FLUSHES = 16  # about a millisecond, in which the host launches what is timed

    def __init__(self) -> None:
        self.cache = _cuda.get_device_properties(None).L2_cache_size
        self._stream = _cuda.Stream()
        self._other = torch.zeros(_TIMES_THE_CACHE * self.cache // 4, device="cuda")

    def here(self) -> AbstractContextManager[Any]:
        """The stream that graphs are captured from."""
        self._stream.wait_stream(_cuda.current_stream())
        return _cuda.stream(self._stream)  # type: ignore[no-any-return]

    def series(self, calls: Sequence[Call]) -> tuple[Run, str]:
        """As a CUDA graph; a call that cannot be captured is timed by events, after the cache was flushed."""
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
        # The results are kept until the others have theirs: an allocator would give each call the memory that the
        # one before it has just written, and the cache would never have to write it back.
        results: deque[Any] = deque(maxlen=len(calls))
        graph = _cuda.CUDAGraph()
        with _cuda.graph(graph, stream=self._stream):
            for call in itertools.islice(itertools.cycle(calls), number):
                results.append(call())
        start, end = (_cuda.Event(enable_timing=True) for _ in range(2))

        # The graph works on the tensors of the calls, so a run keeps them.
        def run(kept: Sequence[Call] = calls) -> float:
            self._flush()
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) * 1e-3 / number

        return run

    def _flush(self) -> None:
        """Fills the cache with something else, which need not be written back; meanwhile the host goes ahead."""
        self._other.sum()

    @staticmethod
    def _end_capture() -> None:
        """After a capture that failed, random numbers believe that it goes on, until they get another state."""
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
    """Wall-clock time."""

    _SECONDS = 10e-3

    def __init__(self) -> None:
        self.cache = _last_cache()

    def here(self) -> AbstractContextManager[Any]:
        """Nowhere in particular."""
        return nullcontext()

    def series(self, calls: Sequence[Call]) -> tuple[Run, str]:
        """By the clock on the wall."""
        calls[0]()
        taken = []
        for call in calls[-3:]:
            started = time.perf_counter()
            call()
            taken.append(time.perf_counter() - started)
        endless = itertools.cycle(calls)
        number = max(1, math.ceil(self._SECONDS / min(taken)))
        results: deque[Any] = deque(maxlen=len(calls))  # kept, so that calls do not write where one has just written

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
    """How to run a series of calls, of which the host's part is timed; the device must be done sooner than the host.

    To be run `on_one_core`, where the device is another than the host.
    """

    def run() -> float:
        if device == "cuda":
            _cuda.synchronize()
        for _ in range(20):  # the first ones after a rest take longer
            call()
        started = time.perf_counter()
        for _ in range(_HOST_CALLS):
            call()
        return (time.perf_counter() - started) / _HOST_CALLS

    return run


@contextmanager
def on_one_core() -> Iterator[None]:
    """Keeps all threads of this process on one core, the one that is fastest now.

    Autograd's backward runs in a thread of its own. On one core a call costs what its threads compute; otherwise it
    costs as well what the machine needs to wake another core, which on a virtual one can be several times as much.
    """
    before = {}
    for thread in _threads():
        with suppress(ProcessLookupError):
            before[thread] = os.sched_getaffinity(thread)
    core = min(os.sched_getaffinity(0), key=_seconds_on)
    for thread in before:
        with suppress(ProcessLookupError):
            os.sched_setaffinity(thread, {core})
    try:
        yield
    finally:
        everywhere = set().union(*before.values())
        for thread in _threads():  # one that began meanwhile has taken over its maker's core
            with suppress(ProcessLookupError):
                os.sched_setaffinity(thread, before.get(thread, everywhere))


def _seconds_on(core: int) -> float:
    """What a core takes for the same each time: on a virtual machine twice as long where others use it, too."""
    os.sched_setaffinity(0, {core})
    return timeit.timeit("sum(range(1000))", number=200)


def _threads() -> list[int]:
    return [int(thread.name) for thread in Path("/proc/self/task").iterdir()]
