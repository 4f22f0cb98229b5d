"""How long work in the toolchain room reports itself."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    from rich.progress import TaskID


class Progress(Protocol):
    """Told about downloads and waits. Calls come often and must be cheap."""

    def advance(self, label: str, done: int, total: int) -> None:
        """`done` of `total` bytes of `label` are here; equal when it is complete."""

    def say(self, message: str) -> None:
        """Something a person would want to know, one line."""


class Silent:
    """Reports nothing."""

    def advance(self, label: str, done: int, total: int) -> None:
        pass

    def say(self, message: str) -> None:
        pass


class Lines:
    """Plain lines, for logs: one when a download begins, one every few seconds, one when it ends."""

    SECONDS_BETWEEN = 5.0

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._label = ""
        self._last = 0.0

    def advance(self, label: str, done: int, total: int) -> None:
        now = time.monotonic()
        if label == self._label and done < total and now - self._last < self.SECONDS_BETWEEN:
            return
        self._label, self._last = label, now
        self.say(f"{label}: {done / 1e6:.1f} of {total / 1e6:.1f} MB")

    def say(self, message: str) -> None:
        print(message, file=self._stream, flush=True)


class Bars(AbstractContextManager["Bars"]):
    """A bar for each download, on a terminal. Shows nothing until there is something to show."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
        from rich.progress import Progress as RichProgress

        self._bars = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            console=Console(file=stream),
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Bars:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def advance(self, label: str, done: int, total: int) -> None:
        if label not in self._tasks:
            self._bars.start()
            self._tasks[label] = self._bars.add_task(label, total=total)
        self._bars.update(self._tasks[label], completed=done)

    def say(self, message: str) -> None:
        self._bars.console.print(message, highlight=False)


def shown(stream: TextIO) -> AbstractContextManager[Progress]:
    """Bars where the stream is a terminal, else plain lines."""
    return Bars(stream) if stream.isatty() else nullcontext(Lines(stream))
