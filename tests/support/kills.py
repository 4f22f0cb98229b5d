"""Kills a process at each of its changes to the file system in turn."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator

_CHANGES = {
    *("os.chmod", "os.chown", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.setxattr"),
    *("os.symlink", "os.truncate", "os.utime"),
}


def killed_at_each_change(work: Callable[[], object]) -> Iterator[str]:
    """Run `work` in forks: the first gets SIGKILL before it changes anything, the next before its second change.

    Changes are the calls of Python that make, open for writing, rename, mark or remove a file or a directory. Yields
    the call after each kill, and ends when a fork has done all its work.

    Raises:
        AssertionError: If `work` raises an exception; its traceback is printed.
    """
    for number in itertools.count():
        reads, writes = os.pipe()
        child = os.fork()
        if child == 0:
            _work(work, number, writes)
        os.close(writes)
        with os.fdopen(reads) as pipe:
            call = pipe.read()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status == 0:
            return
        assert status == -signal.SIGKILL, f"the work ended with {status}"
        yield call


def _work(work: Callable[[], object], number: int, writes: int) -> None:
    changes = itertools.count()

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if _is_change(event, arguments) and next(changes) == number:
            os.write(writes, f"{event} {arguments}".encode())
            os.kill(os.getpid(), signal.SIGKILL)

    status = 1
    try:
        sys.addaudithook(hook)
        work()
        status = 0
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(status)


def _is_change(event: str, arguments: tuple[object, ...]) -> bool:
    if event != "open":
        return event in _CHANGES
    flags = arguments[2]
    return isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) != 0
