"""Running git without hooks, and without the configuration of the machine or of a user."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from pathlib import Path

from kernel_hub.refusals import busy
from kernel_hub.storage.disk import sync_filesystem

_SECONDS = 60.0
# The last: `git repack -a -d` of another process drops objects that no ref reaches yet.
_LOCKED = ("but expected", "File exists", "Unable to create", "reference already exists", "nonexistent object")
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


def merge_base(path: str, one: str, other: str) -> str | None:
    """Return the newest common ancestor of two commits. libgit2 would search for it while all threads wait."""
    done = run_git("-C", path, "merge-base", one, other, seconds=_SECONDS)
    if done.returncode > 1:
        raise OSError(errno.EIO, done.stderr.strip(), path)
    return done.stdout.strip() or None


def change_repository(path: Path, *arguments: str, lines: str = "") -> None:
    """Run git to change the refs or the configuration of a repository, durably. The caller holds the repository's lock.

    Raises:
        Refusal: If another process holds git's lock, or has changed the ref meanwhile.
        OSError: If git cannot write. Git does not report that the disk is full.
    """
    done = run_git("-C", str(path), *arguments, seconds=_SECONDS, lines=lines)
    message = done.stderr.strip()
    if done.returncode and any(reason in message for reason in _LOCKED):
        raise busy(f"{path.name} is locked or was changed by another process; try again: {message}")
    if done.returncode:
        is_full = shutil.disk_usage(path).free < 64 << 10
        raise OSError(errno.ENOSPC if is_full else errno.EIO, message, str(path))
    sync_filesystem(path)
