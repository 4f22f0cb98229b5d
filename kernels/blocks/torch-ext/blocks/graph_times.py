"""Whether a graph is worth its memory: the GPU time of one replay, beside that of one eager call."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Optional

from .gpu import Stopwatch

# A shorter forward is limited by the host, which a graph relieves. It is not compared.
_LONG_MS = 20.0
_SLOWER = 1.1  # what one sample of each can tell


class GraphTimes:
    """The times of a captured call.

    A graph may run other kernels than eager calls do. transformers, for one, reads position ids to do without an
    attention mask, and cannot while a graph is captured: attention over 8,192 tokens is slower then.
    """

    def __init__(self, start: Callable[[], Stopwatch]) -> None:
        self._start = start
        self._replay: Optional[Stopwatch] = None
        self._eager: Optional[Stopwatch] = None
        self._is_open = True

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Time a replay, if it is the first."""
        if self._replay is not None:
            yield
            return
        watch = self._start()
        yield
        watch.stop()
        self._replay = watch

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Time an eager call. There is no second one, even if this fails."""
        self._is_open = False
        watch = self._start()
        yield
        watch.stop()
        self._eager = watch

    def needs_eager(self) -> bool:
        """Return whether the next call should be eager, to be timed."""
        taken = self._replay.milliseconds() if self._is_open and self._replay is not None else None
        return taken is not None and taken >= _LONG_MS

    def find_slower(self) -> Optional[str]:
        """Return in words by how much replays are slower than eager calls, or None."""
        if self._replay is None or self._eager is None:
            return None
        graph, eager = self._replay.milliseconds(), self._eager.milliseconds()
        if graph is None or eager is None or graph <= _SLOWER * eager:
            return None
        return f"its graph is slower: {graph:.0f} ms, and {eager:.0f} ms without"
