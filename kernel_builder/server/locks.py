"""Locks between threads, processes and machines that share a directory. A lock is freed when its holder dies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, ReadWriteLock, Timeout

from kernel_builder.server.refusals import Refusal, busy, no_repository

LOCK_SECONDS = 30.0
_POLL_SECONDS = 0.005  # a commit holds the lock for some milliseconds
_STORE = "the store of large files"


@contextmanager
def repository_lock(path: Path, repo_id: str) -> Iterator[None]:
    """Hold the lock of the repository at `path`.

    The lock file is beside the repository. Inside, it would move when the repository is renamed or deleted, and a
    waiting process would create the directory again.

    Raises:
        Refusal: If the lock is not free in time, or the repository was deleted or renamed meanwhile.
    """
    try:
        with FileLock(_lock_file(path), timeout=LOCK_SECONDS, poll_interval=_POLL_SECONDS):
            if not path.is_dir():
                raise no_repository(repo_id)
            yield
    except Timeout:
        raise _not_free(repo_id) from None


def remove_repository_lock(path: Path) -> None:
    """Delete the lock file of a repository that no longer exists at `path`. The caller holds the lock.

    Waiting processes see that their lock file was deleted, and open a new one.
    """
    _lock_file(path).unlink(missing_ok=True)


def _lock_file(path: Path) -> Path:
    return path.with_name(f".lock-{path.name}")


class StoreLock:
    """The lock of the store of large files, at `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # One instance for all uploads of this server: to open another costs 0.3 ms.
        self._shared = ReadWriteLock(path, is_singleton=False)

    @contextmanager
    def storing(self) -> Iterator[None]:
        """Hold the lock, together with others that store files.

        Raises:
            Refusal: If the lock is not free in time.
        """
        try:
            with self._shared.read_lock(LOCK_SECONDS):
                yield
        except Timeout:
            raise _not_free(_STORE) from None

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Hold the lock alone, to delete files.

        Raises:
            Refusal: If the lock is not free in time.
        """
        lock = ReadWriteLock(self._path, is_singleton=False)
        try:
            with lock.write_lock(LOCK_SECONDS):
                yield
        except Timeout:
            raise _not_free(_STORE) from None
        finally:
            lock.close()


def _not_free(what: str) -> Refusal:
    return busy(f"{what} is locked by others for {LOCK_SECONDS:.0f} s; try again")
