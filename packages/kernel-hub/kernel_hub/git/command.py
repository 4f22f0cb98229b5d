"""How the server runs git: without hooks, and without the configuration of the machine or of a user."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

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
    *arguments: str,
    seconds: float,
    settings: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
    limits: Mapping[int, int] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run git to its end, which may be a failure.

    Args:
        environment: More environment variables.
        limits: Limits of each of its processes: numbers of the module `resource`, and values.

    Raises:
        FileNotFoundError: If git is not installed.
        subprocess.TimeoutExpired: If it runs longer than `seconds`; it is killed, and its children.
    """
    with subprocess.Popen(
        git_command(*arguments, settings=settings),
        env={**git_environment(), **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            limit(process.pid, limits or {})
            output, errors = process.communicate(timeout=seconds)
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def limit(pid: int, limits: Mapping[int, int]) -> None:
    """Limit a process that has just begun, and those that it will start."""
    with suppress(ProcessLookupError):
        for number, value in limits.items():
            resource.prlimit(pid, number, (value, value))


def end_children() -> None:
    """Kill the processes of git that this process has started, each with those that it has started."""
    for listed in Path("/proc/self/task").glob("*/children"):
        for pid in map(int, listed.read_text().split()):
            with suppress(ProcessLookupError):
                if os.getpgid(pid) == pid:
                    os.killpg(pid, signal.SIGKILL)
                else:
                    os.kill(pid, signal.SIGKILL)
