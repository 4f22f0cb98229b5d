"""The processes below one process, and the memory and disk space that they use."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import stat
import sys
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_ENDING = (signal.SIGTERM, signal.SIGINT)
_MOST_WALKS = 100
_MOST_LISTS = 20
_ENTRY_BYTES = 64 << 10
_BUFFER_BYTES = 1 << 20
_LONGEST_FILE = 8192
# The name, in the first line, may have any text but a line break.
_STATUS = re.compile(
    rb"\nState:\t(\w).*\nvoluntary_ctxt_switches:\t(\d+)\nnonvoluntary_ctxt_switches:\t(\d+)", re.DOTALL
)
_RUNNING = "RSD"  # states of threads: running, sleeping until a signal, such as SIGSTOP, and until a disk has answered
STOPPED = "T"
_STOP_SECONDS = 1.0


def descendants(process: int) -> set[int]:
    """Return the processes that a process has started, in any session or group.

    The newest are read first, and all again if one has ended meanwhile: it may have started another, unlisted one.
    """
    found = {process}
    for _ in range(_MOST_LISTS):
        parents = {number: _parent(number) for number in sorted(psutil.pids(), reverse=True)}
        while new := {child for child, parent in parents.items() if parent in found} - found:
            found |= new
        if None not in parents.values():
            break
    return found - {process}


def _parent(process: int) -> int | None:
    with suppress(OSError):
        return int(_content(f"/proc/{process}/stat").rpartition(b")")[2].split(None, 2)[1])
    return None


def _content(file: str) -> bytes:
    """Return the content of a small file of /proc. `Path` takes four times as long, and a judgement reads 100,000."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        return os.read(descriptor, _LONGEST_FILE)
    finally:
        os.close(descriptor)


def suspend_descendants(process: int, *, wait: bool = False) -> set[int]:
    """Stop all processes below a process, and return them. A process that still runs may start another meanwhile."""
    stopped: set[int] = set()
    for _ in range(_MOST_WALKS):
        if not (running := descendants(process) - stopped):
            break
        signal_each(running, signal.SIGSTOP)
        if wait:
            wait_until_stopped(running)
        stopped |= running
    return stopped


def wait_until_stopped(processes: Collection[int]) -> None:
    """Wait until no thread of processes that were sent SIGSTOP runs, or waits for a core or a disk to handle it."""
    end = time.monotonic() + _STOP_SECONDS
    threads = thread_switches(processes)
    while any(state in _RUNNING for state, _ in threads.values()) and time.monotonic() < end:
        time.sleep(1e-4)
        threads = thread_switches(processes)
    for thread, (state, _) in threads.items():
        if state == STOPPED:  # in this state before it leaves its core, for which Linux waits to read its registers
            with suppress(OSError):
                _content(f"/proc/{thread}/syscall")


def thread_switches(processes: Iterable[int]) -> dict[int, tuple[str, int]]:
    """Return the state of each thread of processes, and how often it has left a core."""
    threads = {}
    for process in processes:
        with suppress(OSError):  # it has ended
            for task in os.scandir(f"/proc/{process}/task"):
                with suppress(OSError):
                    if fields := _STATUS.search(_content(f"{task.path}/status")):
                        threads[int(task.name)] = fields[1].decode(), int(fields[2]) + int(fields[3])
    return threads


def guarded_fork(parent: int) -> None:
    """Go on in a child. This process becomes its guard, and ends as it does.

    Every process that the child leaves behind becomes the guard's child, whatever session, environment or parent it
    had. The guard ends all of them when the child ends, on SIGTERM, and when its parent is killed.
    """
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in _ENDING:
        signal.signal(number, _give_up)
    if os.getppid() != parent:  # it was killed before the signal was requested
        os._exit(1)
    if not (child := os.fork()):
        for number in _ENDING:
            signal.signal(number, signal.SIG_DFL)
        return
    status = None
    while status is None:
        ended, ended_as = os.wait()
        status = os.waitstatus_to_exitcode(ended_as) if ended == child else None
    end_descendants()
    if status < 0:
        with suppress(OSError):  # of SIGKILL
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _give_up(*_: object) -> None:
    """End everything, for a limit or the end of the search."""
    end_descendants()
    os.kill(os.getpid(), signal.SIGKILL)


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


def memory_bytes(processes: Collection[int], most: int) -> int:
    """Return the memory of processes, with shared pages divided among the processes that share them.

    This is an upper bound if that is at most `most`: the exact figure makes Linux look at each page.
    """
    for method, field in (("memory_info", "rss"), ("memory_full_info", "pss")):
        total = 0
        for process in processes:
            with suppress(psutil.Error):
                total += getattr(getattr(psutil.Process(process), method)(), field)
        if total <= most:
            break
    return total


def disk_bytes(directory: Path) -> int:
    """Return the space on the disk of everything below a directory. An entry counts as its inode's share at least.

    A directory that cannot be read, or whose path is longer than Linux accepts, counts as more than any limit.
    """
    total, queue = 0, [str(directory)]
    try:
        while queue:
            with suppress(FileNotFoundError, NotADirectoryError), os.scandir(queue.pop()) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):  # removed in the meantime
                        total += max(entry.stat(follow_symlinks=False).st_blocks * 512, _ENTRY_BYTES)
                        if entry.is_dir(follow_symlinks=False):
                            queue.append(entry.path)
    except OSError:
        return sys.maxsize
    return total


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
