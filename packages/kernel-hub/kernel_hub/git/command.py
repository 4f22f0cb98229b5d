"""Running git without hooks, and without the configuration of the machine or of a user."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from pathlib import Path

# Repositories may belong to another user than the server's. Git retries for the given milliseconds if one of its own
# lock files exists, and syncs refs before it reports success.
_SETTINGS = (
    "safe.directory=*",
    "core.hooksPath=/dev/null",
    "core.fsync=all",
    "core.filesRefLockTimeout=2000",
    "core.packedRefsTimeout=5000",
    "pack.threads=1",
    "gc.auto=0",
)


def git_command(*arguments: str, settings: tuple[str, ...] = ()) -> list[str]:
    """Return a command line of git, with more settings as `key=value`."""
    return ["git", *(option for setting in (*_SETTINGS, *settings) for option in ("-c", setting)), *arguments]


def git_environment() -> dict[str, str]:
    """Return the environment variables that git gets: PATH of this process, and no other."""
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": "/nonexistent",
        "LC_ALL": "C",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
    }


def run_git(*arguments: str, seconds: float, lines: str = "") -> subprocess.CompletedProcess[str]:
    """Run git to its end, which may be a failure.

    Args:
        seconds: The timeout.
        lines: The standard input.

    Raises:
        FileNotFoundError: If git is not installed.
        subprocess.TimeoutExpired: If it runs longer than `seconds`; it is killed.
    """
    return subprocess.run(
        git_command(*arguments),
        env=git_environment(),
        input=lines,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=seconds,
        check=False,
    )


def write_error(path: Path, message: str) -> OSError:
    """Return the error for a failed write to a repository. Git does not report that the disk is full."""
    is_full = shutil.disk_usage(path).free < 64 << 10
    return OSError(errno.ENOSPC if is_full else errno.EIO, message.strip(), str(path))
