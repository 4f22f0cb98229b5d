"""Locks between threads, processes and machines that share a directory. A lock is freed when its holder dies.

No function here waits: one that finds its lock taken raises `NotFree` at once, so that waiting does not occupy a
worker. `http.turns` waits on behalf of requests, and `patiently` for commands.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from kernel_hub.refusals import NotFree, no_repository

LOCK_SECONDS = 30.0
POLL_SECONDS = 0.005  # a commit holds the lock for some milliseconds
_STORE = "the store of large files"

Result = TypeVar("Result")


def patiently(attempt: Callable[[], Result], seconds: float | None = None) -> Result:
    """Call a function until it gets its locks.

    Args:
        attempt: The function. It raises `NotFree` before it has changed anything.
        seconds: The longest time to wait. None: `LOCK_SECONDS`.

    Raises:
        NotFree: If the locks are not free in time.
    """
    until = time.monotonic() + (LOCK_SECONDS if seconds is None else seconds)
    while True:
        try:
            return attempt()
        except NotFree:
            if time.monotonic() > until:
                raise
            time.sleep(POLL_SECONDS)


@contextmanager
def repository_lock(path: Path, repo_id: str) -> Iterator[None]:
    """Hold the lock of the repository at `path`.

    The lock file is beside the repository. Inside, it would move when the repository is renamed or deleted, and a
    waiting process would create the directory again.

    Raises:
        NotFree: If another thread or process holds the lock.
        Refusal: If there is no such repository.
    """
    if not path.is_dir():
        raise no_repository(repo_id)
    with _flock(_lock_file(path), repo_id):
        if not path.is_dir():
            raise no_repository(repo_id)
        yield


@contextmanager
def _flock(file: Path, what: str, kind: int = fcntl.LOCK_EX) -> Iterator[None]:
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _not_free(what) from None
        # The file may have been removed or replaced since it was opened. Then others lock the file that has its name.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), file.stat()):
                yield
                return
        raise _not_free(what)
    finally:
        os.close(descriptor)


def remove_repository_lock(path: Path) -> None:
    """Delete the lock file of a repository that no longer exists at `path`. The caller holds the lock."""
    _lock_file(path).unlink(missing_ok=True)


def _lock_file(path: Path) -> Path:
    return path.with_name(f".lock-{path.name}")


class StoreLock:
    """The lock of the store of large files, at `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def storing(self) -> AbstractContextManager[None]:
        """Hold the lock, together with others that store files.

        Raises:
            NotFree: If another process deletes files.
        """
        return _flock(self._path, _STORE, fcntl.LOCK_SH)

    def collecting(self) -> AbstractContextManager[None]:
        """Hold the lock alone, to delete files.

        Raises:
            NotFree: If others hold it.
        """
        return _flock(self._path, _STORE)


def _not_free(what: str) -> NotFree:
    return NotFree(f"{what} is locked by others; try again")
