"""Asks compilers outside the store about themselves, and remembers the answers until their files change.

Hashing a compiler or asking for its version takes up to seconds; looking whether its files have changed does not.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from subprocess import SubprocessError
from typing import Any

from kernel_format.errors import ToolchainError
from kernel_format.files import write_atomically
from kernel_sandbox.programs import run_program


def output_of(
    program: Path, *arguments: str, hint: str, stderr: bool = False, environment: Mapping[str, str] = os.environ
) -> str:
    """Return the output of a program, of stdout or on request of stderr, even if it fails."""
    try:
        done = run_program(str(program), *arguments, env={**environment, "LC_ALL": "C"})
    except (OSError, SubprocessError) as error:
        raise ToolchainError(f"cannot be run: {error}", where=str(program), hint=hint) from error
    return (done.stderr if stderr else done.stdout).decode(errors="replace").strip()


def signature(paths: Iterable[Path]) -> str:
    """Return a digest of the sizes, times and inodes of files; for a directory, of all files below it."""
    digest = hashlib.sha256()
    for root in paths:
        for path in sorted(root.rglob("*")) if root.is_dir() else [root]:
            status = path.stat() if path.exists() else path.lstat()  # a dangling link counts too
            times = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
            digest.update(f"{path}\0{times}\n".encode())
    return digest.hexdigest()


class ProbeCache:
    """Answers kept in a directory. If the directory cannot be written, each question is answered anew."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def recall(self, topic: str, paths: Iterable[Path], find_out: Callable[[], Any], *keys: str) -> Any:
        """Return the last result of `find_out` for these files, if it has these keys, or call it now."""
        key = hashlib.sha256(f"{topic}\0{signature(paths)}".encode()).hexdigest()
        kept = self._directory / key
        with suppress(OSError, ValueError, TypeError):
            value = json.loads(kept.read_text())
            if all(key in value for key in keys):
                return value
        value = find_out()
        with suppress(OSError):
            self._directory.mkdir(parents=True, exist_ok=True)
            write_atomically(kept, json.dumps(value))
        return value
