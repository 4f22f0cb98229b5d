"""How the server runs git: without hooks, and without the configuration of the machine or of a user."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping

# Repositories may belong to another user than the server's.
_SETTINGS = ("safe.directory=*", "core.hooksPath=/dev/null", "pack.threads=1", "gc.auto=0")


def git_command(*arguments: str, settings: tuple[str, ...] = ()) -> list[str]:
    """Return a command line of git.

    Args:
        settings: More settings for this command, as `key=value`.
    """
    options = [option for setting in (*_SETTINGS, *settings) for option in ("-c", setting)]
    return ["git", *options, *arguments]


def git_environment() -> dict[str, str]:
    """Return the environment variables that git gets; none of this process's but PATH."""
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": "/nonexistent",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
    }


def run_git(
    *arguments: str, seconds: float, settings: tuple[str, ...] = (), environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run git to its end, which may be a failure.

    Args:
        environment: More environment variables.

    Raises:
        FileNotFoundError: If git is not installed.
        subprocess.TimeoutExpired: If it runs longer than `seconds`; it is killed.
    """
    return subprocess.run(
        git_command(*arguments, settings=settings),
        env={**git_environment(), **(environment or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        timeout=seconds,
    )
