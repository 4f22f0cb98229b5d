"""Locks between threads and processes that share a directory. A lock is freed when its holder dies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NoReturn

from kernel_format.files import locked
from kernel_hub.refusals import busy, no_repository

LOCK_SECONDS = 50.0  # a commit takes some 0.1 s, and proxies wait for 60 s by default


def exclusive_lock(path: Path, name: str) -> AbstractContextManager[None]:
    """Hold the lock at `path`.

    Raises:
        Refusal: If another thread or process holds it for longer than `LOCK_SECONDS`.
    """

    def give_up() -> NoReturn:
        raise busy(f"{name} has been locked for {LOCK_SECONDS:.0f} s; try again")

    return locked(path, waiting=give_up, patience=LOCK_SECONDS)


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
