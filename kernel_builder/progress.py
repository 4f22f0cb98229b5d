"""Progress reports of builds, downloads, uploads and measurements."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TextIO

Unit = Literal["steps", "bytes"]

_CLEAR = "\r\033[K"  # the line of a terminal
# Of the builder's own output: the start of a status line, and colors.
_OWN = re.compile(r"(\A\r\033\[K|\033\[(?:0|1|3[1-6])m)")
_WORKFLOW_COMMAND = re.compile(r"^(\s*:)(?=:)|#(?=#(?:\[|vso))", re.MULTILINE)


def printable(text: str) -> str:
    """Return text, which may be of a project, a Hub or an agent, without commands for terminals and for CI services."""

    def escaped(part: str) -> str:
        shown = (c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in part)
        return _WORKFLOW_COMMAND.sub(lambda match: f"{match[0]} ", "".join(shown))

    return "".join(part if number % 2 else escaped(part) for number, part in enumerate(_OWN.split(text)))


class PrintableStream:
    """A stream that writes `printable` text."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(printable(text))

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Progress:
    """Receives progress reports and shows nothing. Calls are frequent and must be cheap."""

    def advance(self, task: str, done: int, total: int, *, unit: Unit = "steps", detail: str = "") -> None:
        """Report that `done` of `total` units of a task are complete."""

    def say(self, message: str) -> None:
        """Report one message."""


class Lines(Progress):
    """One line for each step, and for bytes one every few seconds; on a terminal, a line that each report replaces.

    Args:
        is_terminal: Whether the stream is a terminal that shows nothing else meanwhile.
    """

    SECONDS_BETWEEN = 5.0

    def __init__(self, stream: TextIO, *, is_terminal: bool = False) -> None:
        self._stream, self._clear = stream, _CLEAR if is_terminal else ""
        self._task = ""
        self._last = 0.0

    def advance(self, task: str, done: int, total: int, *, unit: Unit = "steps", detail: str = "") -> None:
        text = f"{task}: {done / 1e6:.1f} of {total / 1e6:.1f} MB"
        if unit == "steps":
            text = f"[{done}/{total}] {detail or task}"
        if self._clear:
            self._stream.write(f"{_CLEAR}{text[: shutil.get_terminal_size().columns - 1]}")
            self._stream.flush()
            return
        now = time.monotonic()
        if unit == "steps" or task != self._task or done >= total or now - self._last >= self.SECONDS_BETWEEN:
            self._task, self._last = task, now
            self.say(text)

    def say(self, message: str) -> None:
        print(f"{self._clear}{message}", file=self._stream, flush=True)


@contextmanager
def shown(stream: TextIO) -> Iterator[Progress]:
    """Report progress in a status line if the stream is a terminal, or else in plain lines."""
    try:
        yield Lines(stream, is_terminal=stream.isatty())
    finally:
        if stream.isatty():
            stream.write(_CLEAR)
            stream.flush()
