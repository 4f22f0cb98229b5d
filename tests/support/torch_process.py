"""Runs programs with Torch, each in a process of its own.

Importing Torch takes two seconds of processor time. The fork server of multiprocessing imports it once for all programs
of a test process. Each program runs in a fork of that server, which has loaded no kernel and not the client.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from subprocess import CompletedProcess

_SECONDS = 300
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["torch", "torch._dynamo", "torch._inductor.config"])


def run_with_torch(code: str, *arguments: object, **environment: str) -> CompletedProcess[str]:
    """Run a program as `python -c` does, with more variables of the environment, and return what it printed."""
    texts = [*map(str, arguments)]
    with tempfile.TemporaryDirectory() as directory:
        printed = [Path(directory, name) for name in ("stdout", "stderr")]
        process = _FORKS.Process(target=_execute, args=(code, texts, {**os.environ, **environment}, printed))
        process.start()
        process.join(_SECONDS)
        if process.exitcode is None:
            process.kill()
            process.join()
        assert process.exitcode is not None
        return CompletedProcess(texts, process.exitcode, *(path.read_text() for path in printed))


def _execute(code: str, arguments: list[str], environment: Mapping[str, str], printed: list[Path]) -> None:
    for descriptor, path in enumerate(printed, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["-c", *arguments]
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
