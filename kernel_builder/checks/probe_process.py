"""A process that imports Torch and the client, and then answers questions about packages."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

# Of one question, unless the caller says otherwise.
SECONDS = 300


class ProbeProcess:
    """Runs `probe.py` in an interpreter of its own, outside the current directory and without network.

    Importing Torch takes seconds, so one process answers all questions of a command, and `start` begins the import
    before the first of them. A process that has died, or has not answered the question before, is replaced.

    Args:
        python: The interpreter whose client and Torch are asked.
    """

    def __init__(self, python: str = sys.executable) -> None:
        self._python = python
        self._running: _Running | None = None

    def __enter__(self) -> ProbeProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def start(self) -> None:
        """Start the process, unless it runs already."""
        self._ready()

    def ask(self, question: str, *arguments: str) -> Callable[[float], Any]:
        """Send a question of `probe.py`, and return a function that waits some seconds for its answer.

        The function returns `("failed", reason)` if the process died or did not answer in time. It waits for the last
        question only.
        """
        running = self._ready()
        running.is_asked = True
        with suppress(OSError):  # it has died, which `wait` reports
            running.connection.send_bytes(json.dumps([question, *arguments]).encode())

        def wait(seconds: float) -> Any:
            try:
                if not running.connection.poll(seconds):
                    return "failed", f"no answer after {seconds:.0f} s"
                answer = json.loads(running.connection.recv_bytes())
            except (EOFError, OSError):
                return "failed", running.death(seconds)
            running.is_asked = False
            return answer

        return wait

    def _ready(self) -> _Running:
        """Return a process that is not busy with a question."""
        if self._running and (self._running.is_asked or self._running.process.poll() is not None):
            self._stop()
        if self._running is None:
            self._running = _Running(self._python)
        return self._running

    def _stop(self) -> None:
        if self._running:
            self._running.stop()
            self._running = None


class _Running:
    """A started process, our end of its connection, and the directory in which it runs.

    Attributes:
        is_asked: Whether it has a question that it has not answered.
    """

    def __init__(self, python: str) -> None:
        self.is_asked = False
        source = (Path(__file__).parent / "probe.py").read_text(encoding="utf-8")
        with ExitStack() as stack:
            empty = stack.enter_context(tempfile.TemporaryDirectory())
            self._words = stack.enter_context((Path(empty) / "words").open("w+", errors="replace"))
            self.connection, other = multiprocessing.Pipe()
            stack.enter_context(self.connection)
            with other:
                self.process = subprocess.Popen(
                    [python, "-X", "faulthandler", "-c", source, str(other.fileno())],
                    cwd=empty,
                    env={**os.environ, "HF_HUB_OFFLINE": "1"},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=self._words,
                    pass_fds=[other.fileno()],
                )
            self._opened = stack.pop_all()

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self._opened.close()

    def death(self, seconds: float) -> str:
        """Return how the process ended, after it has closed the connection."""
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return f"no answer after {seconds:.0f} s"
        if status < 0:
            return f"the process was killed by {signal.Signals(-status).name}"
        self._words.seek(0)
        words = self._words.read().strip().splitlines()
        return f"the process ended with status {status}" + (f": {words[-1]}" if words else "")
