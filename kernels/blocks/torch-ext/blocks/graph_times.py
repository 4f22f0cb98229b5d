"""Whether a graph is worth its memory: the GPU time of one replay, beside that of one eager call."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Optional

from .gpu import Stopwatch

# A shorter forward is limited by the host, which a graph relieves. It is not compared.
_LONG_MS = 20.0
_SLOWER = 1.1  # the resolution of one sample of each


class GraphTimes:
    """The times of a captured call.

    A graph may run other kernels than eager calls do. transformers, for one, does without a mask where an
    `attention_mask` has only ones, and cannot read it while a graph is captured: attention over 8,192 tokens is
    slower then.
    """

    def __init__(self, start: Callable[[], Stopwatch]) -> None:
        self._start = start
        self._watches: dict[str, Optional[Stopwatch]] = {}

    @contextmanager
    def first(self, kind: str) -> Iterator[None]:
        """Time a "replay" or an "eager" call, if it is the first. There is no second one, even if it fails."""
        if kind in self._watches:
            yield
            return
        self._watches[kind] = None
        watch = self._start()
        yield
        watch.stop()
        self._watches[kind] = watch

    def _milliseconds(self, kind: str) -> Optional[float]:
        watch = self._watches.get(kind)
        return None if watch is None else watch.milliseconds()

    def needs_eager(self) -> bool:
        """Return whether the next call should be eager, to be timed."""
        taken = None if "eager" in self._watches else self._milliseconds("replay")
        return taken is not None and taken >= _LONG_MS

    def find_slower(self) -> Optional[str]:
        """Return in words by how much replays are slower than eager calls, or None."""
        graph, eager = self._milliseconds("replay"), self._milliseconds("eager")
        if graph is None or eager is None or graph <= _SLOWER * eager:
            return None
        return f"its graph is slower: {graph:.0f} ms, and {eager:.0f} ms without"
