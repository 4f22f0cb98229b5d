"""Where the builder keeps its cache."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from kernel_format.errors import StoreError


def default_cache() -> Path:
    """Return the builder's cache directory: KERNEL_BUILDER_CACHE, or else the user's cache directory."""
    if named := os.environ.get("KERNEL_BUILDER_CACHE"):
        return Path(named).absolute()
    return user_cache("kernel-builder")


def is_open_to_others(cache: Path) -> bool:
    """Return whether other users can put objects and compilers of theirs into a cache."""
    try:
        status = cache.stat()
    except OSError:  # it is not there yet
        return False
    return bool(status.st_mode & stat.S_IWOTH) or status.st_uid not in {0, os.geteuid()}


def user_cache(program: str) -> Path:
    """Return the directory where a program keeps its cache by default, as the XDG Base Directory Specification says.

    Raises:
        StoreError: If the user has no home directory, such as a user id without an account in a container.
    """
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        return (named if named.is_absolute() else Path("~/.cache").expanduser()) / program
    except RuntimeError as error:
        raise StoreError(
            "this user has no home directory, which the cache is kept in",
            where=f"user {os.getuid()}",
            hint="set KERNEL_BUILDER_CACHE to a directory that can be written, and HOME",
        ) from error
