"""Durable writes, files that only the server's user may read, and locks that a holder's death frees."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import NoReturn

from kernel_format.errors import ConfigError
from kernel_format.files import locked
from kernel_hub.refusals import busy, no_repository

BLOCK = 4096  # bytes of a file system's block
LOCK_SECONDS = 50.0  # a commit takes some 0.1 s, and proxies wait for 60 s by default

# Called with each lock: the caller's token may have been removed while it waited.
check_caller: ContextVar[Callable[[], object]] = ContextVar("check_caller", default=lambda: None)

_libc = ctypes.CDLL(None, use_errno=True)


def occupied(size: int) -> int:
    """Return the bytes that a file of this size takes on the disk: small and empty files count, too."""
    return max(1, -(-size // BLOCK)) * BLOCK


def sync_filesystem(path: Path) -> None:
    """Sync the whole file system of a directory to the disk, in one wait for any number of files."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if _libc.syncfs(descriptor):
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), str(path))
    finally:
        os.close(descriptor)


def private_directory(path: Path) -> None:
    """Create a directory that only this user may enter, or restrict an existing one, whatever the umask."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot be created: {error.strerror}", where=str(path), hint="mkdir and chown it") from error
    _restrict(path, 0o700)


def private_file(path: Path) -> None:
    """Create an empty file that only this user may read, or restrict an existing one, whatever the umask."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    _restrict(path, 0o600)


def _restrict(path: Path, mode: int) -> None:
    with suppress(OSError):  # it belongs to another user, who has chosen the mode, or cannot be written
        if path.stat().st_mode & 0o777 != mode:
            path.chmod(mode)


@contextmanager
def exclusive_lock(path: Path, name: str) -> Iterator[None]:
    """Hold the lock at `path`.

    Raises:
        Refusal: If another thread or process holds it for longer than `LOCK_SECONDS`, or the caller's token has ended.
    """

    def give_up() -> NoReturn:
        raise busy(f"{name} has been locked for {LOCK_SECONDS:.0f} s; try again")

    with locked(path, waiting=give_up, patience=LOCK_SECONDS):
        check_caller.get()()
        yield


@contextmanager
def repository_lock(path: Path, repo_id: str) -> Iterator[None]:
    """Hold the lock of the repository at `path`.

    The lock file is beside the repository. Inside, it would move when the repository is renamed or deleted, and a
    waiting process would create the directory again. It is deleted if the repository is no longer at `path`.

    Raises:
        Refusal: If there is no such repository, or its lock is not free in time.
    """
    if not path.is_dir():
        raise no_repository(repo_id)
    lock = path.with_name(f".lock-{path.name}")
    with exclusive_lock(lock, repo_id):
        try:
            if not path.is_dir():
                raise no_repository(repo_id)
            yield
        finally:
            if not path.is_dir():
                lock.unlink(missing_ok=True)
