"""What is known of programs and headers outside the store, kept for as long as the files stay as they were.

To hash a compiler or to ask it for its version takes time; to look whether its files have changed does not. A fact is
kept under a digest of the paths, sizes and times of the files it follows from.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


def signature(paths: Iterable[Path]) -> str:
    """A digest that changes when one of the files is replaced or rewritten. Directories stand for all files below.

    Raises:
        OSError: If one is missing.
    """
    digest = hashlib.sha256()
    for path in paths:
        if path.is_dir():
            for home, directories, names in os.walk(path):
                directories.sort()
                for name in sorted(names):
                    _add(digest, Path(home) / name)
        else:
            _add(digest, path)
    return digest.hexdigest()


def _add(digest: hashlib._Hash, path: Path) -> None:
    status = path.stat() if path.exists() else path.lstat()  # a dangling link is there, too
    digest.update(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\0{status.st_ctime_ns}\0{status.st_ino}\n".encode())


class ProbeCache:
    """ProbeCache kept in a directory. A directory that cannot be written is no error: they are found out again."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def recall(self, topic: str, paths: Iterable[Path], find_out: Callable[[], Any]) -> Any:
        """A JSON value that follows from these files, from memory or found out now.

        Raises:
            OSError: If one of the files is missing.
        """
        key = hashlib.sha256(f"{topic}\0{signature(paths)}".encode()).hexdigest()
        kept = self._directory / key
        try:
            return json.loads(kept.read_text())
        except (OSError, ValueError):
            pass
        value = find_out()
        new = kept.with_name(f"{key}.{os.getpid()}")
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            new.write_text(json.dumps(value))
            new.replace(kept)
        except OSError:
            new.unlink(missing_ok=True)
        return value
