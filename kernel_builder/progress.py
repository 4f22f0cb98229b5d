"""Progress reports of builds, downloads, uploads and measurements."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Literal, Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

Unit = Literal["steps", "bytes"]


class Progress(Protocol):
    """Receives progress reports. Calls are frequent and must be cheap."""

    def advance(self, task: str, done: int, total: int, *, unit: Unit = "steps", detail: str = "") -> None:
        """Report that `done` of `total` units of a task are complete.

        Args:
            task: Names the task; reports of one task have the same name.
            detail: The last completed unit, for example the title of a compile step.
        """

    def say(self, message: str) -> None:
        """Report one message."""


class Silent:
    """Shows nothing."""

    def advance(self, task: str, done: int, total: int, *, unit: Unit = "steps", detail: str = "") -> None:
        pass

    def say(self, message: str) -> None:
        pass


class Lines:
    """Plain lines, for logs: one for each step; for bytes, one every few seconds."""

    SECONDS_BETWEEN = 5.0

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._task = ""
        self._last = 0.0

    def advance(self, task: str, done: int, total: int, *, unit: Unit = "steps", detail: str = "") -> None:
        if unit == "steps":
            self.say(f"[{done}/{total}] {detail or task}")
            return
        now = time.monotonic()
        if task == self._task and done < total and now - self._last < self.SECONDS_BETWEEN:
            return
        self._task, self._last = task, now
        self.say(f"{task}: {done / 1e6:.1f} of {total / 1e6:.1f} MB")

    def say(self, message: str) -> None:
        print(message, file=self._stream, flush=True)


class Bars(AbstractContextManager["Bars"]):
    """One bar for each task, on a terminal. Shows nothing until the first report."""

    def __init__(self, stream: TextIO) -> None:
        self._bars = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[amount]}"),
            TimeElapsedColumn(),
            console=Console(file=stream),
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Bars:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def advance(self, task: str, done: int, total: int, *, unit: Unit = "steps", detail: str = "") -> None:
        if task not in self._tasks:
            self._bars.start()
            self._tasks[task] = self._bars.add_task(task, total=total, amount="")
        amount = f"{done}/{total}" if unit == "steps" else f"{done / 1e6:.1f}/{total / 1e6:.1f} MB"
        self._bars.update(self._tasks[task], description=detail or task, completed=done, total=total, amount=amount)

    def say(self, message: str) -> None:
        self._bars.console.print(message, highlight=False)


def shown(stream: TextIO) -> AbstractContextManager[Progress]:
    """Return progress bars if the stream is a terminal, or else plain lines."""
    return Bars(stream) if stream.isatty() else nullcontext(Lines(stream))
