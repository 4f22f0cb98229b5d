"""Run an untrusted program under limits of time, memory and disk.

As a program (`python limited_process.py MARK MEMORY DISK CGROUP COMMAND...`), this file is the guard of one run: it
starts the command under limits, and every process that the command leaves behind becomes the guard's child, whatever
session, environment or parent it had. The guard ends all of them when the command ends, on SIGTERM, and when
the search is killed.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple, NoReturn

import psutil

from kernel_judge.judge.process_tree import disk_bytes, end_descendants
from kernel_sandbox.confine import keep_signals_inside

# Seconds between two looks at a program: the first, and the longest, which they double to. `Popen.wait` with a timeout
# starts again at half a millisecond each time, which took 1.7 % of a core for each agent that ran.
_FIRST_POLL, _POLL = 0.002, 0.05
# Between two walks through a workspace: seconds, and as a multiple of the duration of a walk.
_DISK_POLL, _DISK_SHARE = 0.25, 100
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_GUARD_SECONDS = 10  # to end all processes
_MOST_TASKS = 4096  # processes and threads of a run
# Processes of a try have this variable, unless they take it out, whatever session or group they make for themselves.
MARK = "KERNEL_BUILDER_TRY"


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
    with _control_group() as group:
        guard = [sys.executable, "-I", __file__, mark, str(limits.memory_bytes), str(limits.disk_bytes), str(group)]
        with stdin.open("rb") as given:
            process = subprocess.Popen(
                [*guard, *command],
                cwd=directory,
                env=environment,
                stdin=given,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            stopped = _wait(process, started, directory, limits, is_stopping)
        finally:
            with suppress(subprocess.TimeoutExpired):
                process.terminate()
                process.wait(_GUARD_SECONDS)
            process.kill()
            process.wait()
            kill_marked(mark)
    return Ended(process.returncode, time.monotonic() - started, stopped)


@contextmanager
def _control_group() -> Iterator[Path | None]:
    """Make a control group, whose processes the kernel ends at once; None where this user may not make one."""
    try:
        own = re.findall(r"(?m)^0::(.*)$", Path("/proc/self/cgroup").read_text())
        mounted = re.findall(r"(?m)^\S+ (\S+) cgroup2 ", Path("/proc/self/mounts").read_text())
        group = Path(f"{mounted[0]}{own[0]}", f"kernel-builder-{secrets.token_hex(8)}")
        group.mkdir()
    except (OSError, IndexError):
        yield None
        return
    try:
        yield group
    finally:
        with suppress(OSError):  # before Linux 5.14
            (group / "cgroup.kill").write_text("1")
        for _ in range(100):
            try:
                group.rmdir()
                break
            except OSError:  # processes are ending
                time.sleep(0.01)


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
            if disk_bytes(directory) > limits.disk_bytes:
                return "disk"
            done = time.monotonic()
            next_walk = done + max(_DISK_POLL, _DISK_SHARE * (done - now))
    return "search" if is_stopping() else None  # it may have been killed for the end of the search


def kill_marked(mark: str) -> None:
    """Kill every process whose mark is this one or begins with it and a slash, until there is none.

    A process group would not do: programs make groups and sessions of their own, and so does each tool that they run.
    """
    for _ in range(100):
        any_left = False
        for process in psutil.process_iter():
            with suppress(psutil.Error):  # another user's, or has just ended
                found = process.environ().get(MARK, "") if process.pid != os.getpid() else ""
                if found == mark or found.startswith(f"{mark}/"):
                    process.kill()
                    any_left = True
        if not any_left:
            return
        time.sleep(0.01)


def _guarded(mark: str, memory: str, disk: str, group: str, *command: str) -> int:
    """Run a command as its guard, and return its exit status, which is negative if a signal has ended it."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _give_up)
    status = 0
    try:
        child = os.fork()
        if child == 0:
            _become(mark, int(memory), int(disk), Path(group), command)
        while True:
            ended, status = os.wait()
            if ended == child:
                return os.waitstatus_to_exitcode(status)
    finally:
        end_descendants()


def _give_up(*_: object) -> None:
    """End everything, for a limit or the end of the search."""
    end_descendants()
    os.kill(os.getpid(), signal.SIGKILL)


def _become(mark: str, memory: int, disk: int, group: Path, command: tuple[str, ...]) -> NoReturn:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    with suppress(OSError):  # there is no group
        (group / "cgroup.procs").write_text("0")
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
    os.environ[MARK] = mark
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(1)


def _own_tasks() -> int:
    """Return how many processes and threads this user has."""
    processes = (process.info for process in psutil.process_iter(["uids", "num_threads"]))
    return sum(info["num_threads"] or 0 for info in processes if info["uids"] and info["uids"].real == os.getuid())


if __name__ == "__main__":
    exit_status = _guarded(*sys.argv[1:])
    if exit_status < 0:
        os.kill(os.getpid(), signal.SIGKILL)  # as the command ended
    sys.exit(exit_status)
