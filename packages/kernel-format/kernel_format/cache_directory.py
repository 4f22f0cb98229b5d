"""The places of the builder's caches."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from kernel_format.errors import StoreError


def default_cache() -> Path:
    """Return the builder's cache directory: KERNEL_BUILDER_CACHE, or else that of the XDG Base Directory Specification.

    Raises:
        StoreError: If the user has no home directory, such as a user id without an account in a container.
    """
    if named := os.environ.get("KERNEL_BUILDER_CACHE"):
        return Path(named).absolute()
    caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        return (caches if caches.is_absolute() else Path("~/.cache").expanduser()) / "kernel-builder"
    except RuntimeError as error:
        raise StoreError(
            "this user has no home directory for the cache",
            where=f"user {os.getuid()}",
            hint="set KERNEL_BUILDER_CACHE to a directory that can be written, and HOME",
        ) from error


def shared_cache() -> Path | None:
    """Return the read-only second cache that KERNEL_BUILDER_SHARED_CACHE names, or None."""
    named = os.environ.get("KERNEL_BUILDER_SHARED_CACHE")
    return Path(named).absolute() if named else None


def is_open_to_others(cache: Path) -> bool:
    """Return whether other users can write objects and compilers to a cache: all, its owner, or a foreign group."""
    with suppress(OSError):
        if any(above.stat().st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH for above in cache.parents):
            return True
    for directory in (cache, *filter(Path.is_dir, (*cache.glob("*"), *cache.glob("*/*")))):
        with suppress(OSError):  # it does not exist yet
            status = directory.stat()
            writers = stat.S_IWOTH if status.st_gid == os.getegid() else stat.S_IWOTH | stat.S_IWGRP
            if status.st_mode & writers or status.st_uid not in {0, os.geteuid()}:
                return True
    return False
