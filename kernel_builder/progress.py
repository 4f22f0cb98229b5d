"""Progress reports of builds, downloads, uploads and measurements."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, Protocol, TextIO

Unit = Literal["steps", "bytes"]


class Progress(Protocol):
    """Receives progress reports. Calls are frequent and must be cheap."""

    def advance(self, task: str, done: int, total: int, *, unit: Unit = "steps", detail: str = "") -> None:
        """Report that `done` of `total` units of a task are complete."""

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
        now = time.monotonic()
        is_due = task != self._task or done >= total or now - self._last >= self.SECONDS_BETWEEN
        if unit == "steps" or is_due:
            self._task, self._last = task, now
            self.say(_report(task, done, total, unit, detail))

    def say(self, message: str) -> None:
        print(message, file=self._stream, flush=True)


class StatusLine:
    """One line of a terminal, which each report replaces."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def advance(self, task: str, done: int, total: int, *, unit: Unit = "steps", detail: str = "") -> None:
        self.replace(_report(task, done, total, unit, detail))

    def say(self, message: str) -> None:
        self.replace("")
        print(message, file=self._stream, flush=True)

    def replace(self, text: str) -> None:
        self._stream.write(f"\r\033[K{text[: shutil.get_terminal_size().columns - 1]}")
        self._stream.flush()


def _report(task: str, done: int, total: int, unit: Unit, detail: str) -> str:
    if unit == "steps":
        return f"[{done}/{total}] {detail or task}"
    return f"{task}: {done / 1e6:.1f} of {total / 1e6:.1f} MB"


@contextmanager
def shown(stream: TextIO) -> Iterator[Progress]:
    """Report progress in a status line if the stream is a terminal, or else in plain lines."""
    if not stream.isatty():
        yield Lines(stream)
        return
    status = StatusLine(stream)
    try:
        yield status
    finally:
        status.replace("")
