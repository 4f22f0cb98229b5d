"""Durable writes, and files that only the server's user may read."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path

from kernel_format.errors import ConfigError

BLOCK = 4096  # bytes of a file system's block

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
