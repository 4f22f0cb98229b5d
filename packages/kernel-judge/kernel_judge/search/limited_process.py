"""Run an untrusted program under limits of time, memory and disk.

As a program (`python limited_process.py PARENT MEMORY DISK COMMAND...`), this file starts the command under limits,
and becomes its guard (`process_tree.guarded_fork`).
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple, NoReturn

import psutil

from kernel_judge.judge.process_tree import disk_bytes, guarded_fork
from kernel_sandbox.confine import keep_signals_inside

_POLL = 0.02  # seconds between two looks at a program
_DISK_POLL = 0.5  # seconds between two walks through a workspace
_GUARD_SECONDS = 10  # to end all processes
_MOST_TASKS = 4096  # processes and threads of a run


class Limits(NamedTuple):
    """The limits of one run of a program. Memory is that of each process; disk is the directory and each file."""

    seconds: float
    memory_bytes: int
    disk_bytes: int


class Ended(NamedTuple):
    """How a program ended. `stopped` is the limit that it met: "time" or "disk", or "search" if the search ends."""

    exit_status: int
    seconds: float
    stopped: str | None


def run_limited(
    command: Sequence[str],
    directory: Path,
    limits: Limits,
    *,
    stdin: Path,
    output: IO[bytes],
    is_stopping: Callable[[], bool] = lambda: False,
) -> Ended:
    """Run a command in a directory. All of its processes have ended when this returns.

    Args:
        stdin: The file that the command reads.
        output: Receives its output and errors.
        is_stopping: Asked often; True stops the command.
    """
    started = time.monotonic()
    with stdin.open("rb") as given:
        process = subprocess.Popen(
            [*guard(limits.memory_bytes, limits.disk_bytes), *command],
            cwd=directory,
            stdin=given,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        stopped = _wait(process, started, directory, limits, is_stopping)
    finally:
        end_guard(process)
    return Ended(process.returncode, time.monotonic() - started, stopped)


def guard(memory_bytes: int = 0, disk_bytes: int = 0) -> list[str]:
    """Return the command of a guard, to put before a command; 0 for no limits."""
    return [sys.executable, "-I", __file__, str(os.getpid()), str(memory_bytes), str(disk_bytes)]


def end_guard(process: subprocess.Popen[bytes]) -> None:
    """End a guard and all processes below it."""
    with suppress(subprocess.TimeoutExpired):
        process.terminate()
        process.wait(_GUARD_SECONDS)
    process.kill()
    process.wait()


def _wait(
    process: subprocess.Popen[bytes], started: float, directory: Path, limits: Limits, is_stopping: Callable[[], bool]
) -> str | None:
    """Wait for the end of a process; return the limit that it meets first, or None."""
    next_walk = started + _DISK_POLL
    while process.poll() is None:
        time.sleep(_POLL)
        now = time.monotonic()
        if is_stopping():
            return "search"
        if now - started > limits.seconds:
            return "time"
        if now > next_walk:
            if disk_bytes(directory) > limits.disk_bytes:
                return "disk"
            next_walk = time.monotonic() + _DISK_POLL
    return "search" if is_stopping() else None  # it may have been killed for the end of the search


def _become(memory: int, disk: int, *command: str) -> NoReturn:
    if memory:
        _limit(memory, disk)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(1)


def _limit(memory: int, disk: int) -> None:
    # Not RLIMIT_AS: CUDA and JavaScript's engines reserve far more addresses than they use memory.
    limits = {
        resource.RLIMIT_DATA: memory,
        resource.RLIMIT_FSIZE: disk,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: _own_tasks() + _MOST_TASKS,  # root has no limit of this kind
    }
    for kind, value in limits.items():
        _, most = resource.getrlimit(kind)
        limit = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(kind, (limit, limit))
    keep_signals_inside()  # it cannot end its guard


def _own_tasks() -> int:
    """Return how many processes and threads this user has."""
    processes = (process.info for process in psutil.process_iter(["uids", "num_threads"]))
    return sum(info["num_threads"] or 0 for info in processes if info["uids"] and info["uids"].real == os.getuid())


if __name__ == "__main__":
    guarded_fork(int(sys.argv[1]))
    _become(int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
