"""Running git without hooks and configuration of the machine or a user; settings of repositories, and `.gitignore`."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pygit2

from kernel_hub.refusals import bad_request, busy
from kernel_hub.storage.disk import sync_filesystem

_SECONDS = 60.0
_CPU_SECONDS = 1  # git tries each star of a rule at every position of a path: a rule with many takes years
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
    """Run git to its end, which may be a failure. `lines` is its input.

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


class GitConfiguration:
    """Reads and writes the file `config` of the repository at `path`, which is opened as `git`."""

    def __init__(self, path: Path, git: pygit2.Repository) -> None:
        self._path = path
        self._git = git

    def get(self, key: str) -> str | None:
        """Return a value, or None if it is not set."""
        config = self._git.config
        return str(config[key]) if key in config else None

    def names(self, start: str) -> list[str]:
        """Return the keys that begin with `start`."""
        return [entry.name for entry in self._git.config if entry.name.startswith(start)]

    # Git replaces the file as a whole; libgit2 does not report all errors of a full disk.

    def set(self, key: str, value: str) -> None:
        """Set a value, as `change_repository` does."""
        change_repository(self._path, "config", "--file", "config", key, value)

    def remove(self, section: str) -> None:
        """Remove a section with its values, as `change_repository` does."""
        change_repository(self._path, "config", "--file", "config", "--remove-section", section)


def ignored(rules: bytes, paths: Sequence[str]) -> set[str]:
    """Return the paths that a `.gitignore` at the top of a repository excludes, by git's own rules.

    Raises:
        Refusal: If the rules take too long to apply.
    """
    if not rules.strip() or not paths:
        return set()
    with tempfile.TemporaryDirectory(prefix="kernel-builder-") as folder:
        Path(folder, ".gitignore").write_bytes(rules)
        pygit2.init_repository(folder)
        with subprocess.Popen(
            git_command("-C", folder, "check-ignore", "--no-index", "-z", "--stdin"),
            env=git_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as git:
            with suppress(ProcessLookupError):
                resource.prlimit(git.pid, resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))
                os.setpriority(os.PRIO_PROCESS, git.pid, 19)
            # A path that starts with a colon would be a pattern.
            excluded, _ = git.communicate("".join(f"./{path}\0" for path in paths).encode())
    if git.returncode < 0:
        raise bad_request("the rules of .gitignore take too long to apply: use fewer stars in one rule")
    if git.returncode > 1:
        raise OSError(f"git check-ignore failed with exit status {git.returncode}")
    return {path.removeprefix("./") for path in excluded.decode().split("\0")} - {""}
