"""Run a program that nobody has read, under limits of time, memory and disk.

As a program (`python limited_process.py MEMORY DISK COMMAND...`), this file sets the limits of its own process and
becomes the command: between a fork and an exec, Python with threads cannot do so safely.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

# Seconds between two looks at a program: the first, and the longest, which they double to. `Popen.wait` with a timeout
# starts again at half a millisecond each time, which took 1.7 % of a core for each agent that ran.
_FIRST_POLL, _POLL = 0.002, 0.05
# Between two walks through a workspace: seconds, and as a multiple of what the walk takes.
_DISK_POLL, _DISK_SHARE = 0.25, 100
_PR_SET_PDEATHSIG = 1
# Every process of a try has this variable, whatever session or group it makes for itself.
MARK = "KERNEL_BUILDER_TRY"


class Limits(NamedTuple):
    """What one run of a program may use. Memory is that of each process; disk is the directory and each file."""

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
    environment: Mapping[str, str],
    limits: Limits,
    *,
    mark: str,
    stdin: Path,
    output: IO[bytes],
    is_stopping: Callable[[], bool],
) -> Ended:
    """Run a command in a directory. All of its processes have ended when this returns.

    Args:
        mark: Names the run; no other run at the same time has it.
        stdin: The file that the command reads.
        output: Where its output and errors go.
        is_stopping: Asked often; True stops the command.

    Raises:
        OSError: If the command cannot be started.
    """
    started = time.monotonic()
    limited = [sys.executable, "-I", __file__, str(limits.memory_bytes), str(limits.disk_bytes), *command]
    with stdin.open("rb") as given:
        process = subprocess.Popen(
            limited,
            cwd=directory,
            env={**environment, MARK: mark},
            stdin=given,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        stopped = _wait(process, started, directory, limits, is_stopping)
    finally:
        kill_marked(mark)
        process.wait()
    return Ended(process.returncode, time.monotonic() - started, stopped)


def _wait(
    process: subprocess.Popen[bytes],
    started: float,
    directory: Path,
    limits: Limits,
    is_stopping: Callable[[], bool],
) -> str | None:
    """Wait for the end of a process; return the limit that it meets first, or None."""
    next_walk = started + _DISK_POLL
    pause = _FIRST_POLL
    while process.poll() is None:
        time.sleep(pause)
        pause = min(2 * pause, _POLL)
        now = time.monotonic()
        if is_stopping():
            return "search"
        if now - started > limits.seconds:
            return "time"
        if now > next_walk:
            if tree_bytes(directory) > limits.disk_bytes:
                return "disk"
            done = time.monotonic()
            next_walk = done + max(_DISK_POLL, _DISK_SHARE * (done - now))
    return "search" if is_stopping() else None  # it may have been killed for the end of the search


def tree_bytes(directory: Path) -> int:
    """Return the size of all files below a directory, in bytes on the disk."""
    total = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            with suppress(OSError):  # removed in the meantime
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512  # noqa: PTH118
    return total


def kill_marked(mark: str) -> None:
    """Kill every process whose mark is this one or begins with it and a slash, until there is none.

    A process group would not do: programs make groups and sessions of their own, and so does each tool that they run.
    """
    exact, inside = f"{MARK}={mark}\0".encode(), f"{MARK}={mark}/".encode()
    for _ in range(100):
        any_left = False
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            with suppress(OSError):  # another user's, or has just ended
                content = b"\0" + (entry / "environ").read_bytes()
                if b"\0" + exact in content or b"\0" + inside in content:
                    os.kill(int(entry.name), signal.SIGKILL)
                    any_left = True
        if not any_left:
            return
        time.sleep(0.01)


def _become(arguments: Sequence[str]) -> None:
    memory, disk, *command = arguments
    # If the search is killed, so is this process; `kill_marked` finds its children when the search runs again.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Not RLIMIT_AS: CUDA and JavaScript's engines reserve far more addresses than they use memory.
    for kind, value in ((resource.RLIMIT_DATA, memory), (resource.RLIMIT_FSIZE, disk), (resource.RLIMIT_CORE, "0")):
        _, most = resource.getrlimit(kind)
        limit = int(value) if most == resource.RLIM_INFINITY else min(int(value), most)
        resource.setrlimit(kind, (limit, limit))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


if __name__ == "__main__":
    _become(sys.argv[1:])
