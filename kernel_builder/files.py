"""Files that several processes read and write: atomic writes, and locks."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def write_atomically(path: Path, content: str | bytes, *, mode: int = 0o644) -> None:
    """Write a file so that a reader finds the old content or the new content, whole.

    The content is on the disk before the file takes its name, so a crash cannot leave an empty file either. `path` is
    not a symbolic link.

    Raises:
        OSError: If the directory cannot be written, or the disk is full; the old file is kept.
    """
    descriptor, staged = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fchmod(descriptor, mode)
            os.fsync(descriptor)
        os.replace(staged, path)  # noqa: PTH105
    except BaseException:
        os.unlink(staged)  # noqa: PTH108
        raise


@contextmanager
def locked(path: Path, *, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the lock at `path`, which is freed when its holder dies.

    Args:
        waiting: Called once if another process holds the lock; may raise an exception in order not to wait.

    Raises:
        OSError: If the directory of `path` cannot be written.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        waiting()
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
