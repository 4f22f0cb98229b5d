"""The processes below one process, and the memory and disk space that they use."""

from __future__ import annotations

import os
import re
import signal
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

_MOST_WALKS = 100
_ENTRY_BYTES = 64 << 10
_BUFFER_BYTES = 1 << 20
_RUNNING = "RS"  # states of threads: running, and sleeping until a signal, such as SIGSTOP
_STOP_SECONDS = 1.0


def descendants(process: int) -> set[int]:
    """Return the processes that a process has started, in whatever session or group they are."""
    with suppress(psutil.NoSuchProcess):
        return {child.pid for child in psutil.Process(process).children(recursive=True)}
    return set()


def suspend_descendants(process: int) -> set[int]:
    """Stop all processes below a process, and return them. A process that still runs may start another meanwhile."""
    stopped: set[int] = set()
    for _ in range(_MOST_WALKS):
        if not (running := descendants(process) - stopped):
            break
        signal_each(running, signal.SIGSTOP)
        stopped |= running
    return stopped


def wait_until_stopped(processes: Iterable[int]) -> None:
    """Wait until no thread of processes that were sent SIGSTOP runs, or waits for a core to handle it."""
    end = time.monotonic() + _STOP_SECONDS
    for process in processes:
        while not _is_stopped(process) and time.monotonic() < end:
            time.sleep(1e-4)


def _is_stopped(process: int) -> bool:
    for thread in Path(f"/proc/{process}/task").glob("*/stat"):
        with suppress(OSError):  # it has ended
            if thread.read_text().rpartition(")")[2].split()[0] in _RUNNING:
                return False
    return True


def end_descendants() -> None:
    """Kill all processes below this one, and wait until there is none."""
    while True:
        signal_each(suspend_descendants(os.getpid()), signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


def signal_each(processes: Iterable[int], number: int) -> None:
    """Send a signal to processes; skip those that have ended, or that belong to another user."""
    for process in processes:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process, number)


def memory_bytes(processes: Iterable[int], most: int) -> int:
    """Return the memory of processes, with shared pages divided among the processes that share them.

    This is an upper bound if that is at most `most`: the exact figure makes Linux look at each page.
    """
    known = []
    for process in processes:
        with suppress(psutil.Error):
            known.append(psutil.Process(process))
    return used if (used := _total(known, "memory_info", "rss")) <= most else _total(known, "memory_full_info", "pss")


def _total(processes: Iterable[psutil.Process], method: str, field: str) -> int:
    total = 0
    for process in processes:
        with suppress(psutil.Error):
            total += getattr(getattr(process, method)(), field)
    return total


def disk_bytes(directory: Path) -> int:
    """Return the space on the disk of everything below a directory. An entry counts as its inode's share at least."""
    total = 0
    for parent, folders, names in os.walk(directory):
        for name in (*folders, *names):
            with suppress(OSError):  # removed in the meantime
                total += max(os.lstat(os.path.join(parent, name)).st_blocks * 512, _ENTRY_BYTES)  # noqa: PTH118
    return total


def free_bytes(directory: Path) -> int:
    """Return the free space of a directory's file system."""
    status = os.statvfs(directory)
    return status.f_bfree * status.f_frsize


def nameless_bytes(processes: Iterable[int], apart: Iterable[int] = ()) -> int:
    """Return the bytes of the open files of processes that have no name: deleted ones, and memory of `memfd_create`.

    A pipe or socket counts as a full buffer, which is no process's memory.

    Args:
        apart: Descriptors of this process; their files do not count.
    """
    own = {os.fstat(descriptor).st_ino for descriptor in apart}
    sizes = {}
    for process in processes:
        with suppress(OSError):
            for opened in os.scandir(f"/proc/{process}/fd"):
                with suppress(OSError):
                    status = opened.stat()
                    if stat.S_ISREG(status.st_mode) and status.st_nlink == 0 and status.st_ino not in own:
                        sizes[status.st_dev, status.st_ino] = status.st_blocks * 512
                    elif stat.S_ISFIFO(status.st_mode) or stat.S_ISSOCK(status.st_mode):
                        sizes[status.st_dev, status.st_ino] = _BUFFER_BYTES
    return sum(sizes.values())


def map_deleted_files(processes: Iterable[int]) -> bool:
    """Return whether processes have mapped deleted files, which need no open descriptor."""
    for process in processes:
        with suppress(OSError):
            maps = Path(f"/proc/{process}/maps").read_text(errors="replace")
            if re.search(r" (?!/memfd:|/dev/zero)/\S.* \(deleted\)$", maps, re.MULTILINE):
                return True
    return False
