"""Programs outside of a sandbox. None of them is, or is configured by, a file of the current directory.

It may be an untrusted project: `python -m` imports its modules, and rustup runs the toolchain that it names.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


def find_program(name: str) -> str | None:
    """Return the absolute path of a program on PATH, whose relative entries do not count; None if there is none."""
    entries = os.environ.get("PATH", os.defpath).split(os.pathsep)
    found = shutil.which(name, path=os.pathsep.join(entry for entry in entries if Path(entry).is_absolute()))
    return found and str(Path(found).absolute())


def run_program(
    *command: str, env: Mapping[str, str] = os.environ, stdin: bytes = b"", seconds: float | None = 60
) -> subprocess.CompletedProcess[bytes]:
    """Run a program in the root directory to its end, which may be a failure.

    Raises:
        OSError, subprocess.SubprocessError: If it cannot be run, or takes longer.
    """
    words, variables = [find_program(command[0]) or command[0], *command[1:]], {**env, "PWD": "/"}
    return subprocess.run(words, cwd="/", env=variables, input=stdin, capture_output=True, check=False, timeout=seconds)


def python_module(name: str, *arguments: str) -> list[str]:
    """Return a command that runs a module, which it imports from this process's `sys.path` alone.

    The directory that `python -m` adds in front, the current one, does not count, nor do Python's variables.
    """
    path = sys.path[1:] if Path(sys.path[0]).resolve() == Path.cwd() else sys.path
    start = f"import sys; sys.path[:] = {path}; import runpy; runpy.run_module({name!r}, None, '__main__', True)"
    return [sys.executable, "-I", "-c", start, *arguments]


@contextmanager
def root_directory() -> Iterator[None]:
    """Make / the current directory of this process, for libraries that read files of the current one."""
    before = os.open(".", os.O_PATH)
    os.chdir("/")
    try:
        yield
    finally:
        os.fchdir(before)
        os.close(before)
