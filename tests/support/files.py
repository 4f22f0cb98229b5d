"""Files of several directories, and programs, that tests write."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path


def write_files(directory: Path, files: Mapping[str, str] | Iterable[str]) -> Path:
    """Write texts, or empty files, below a directory, and return the directory."""
    for name, text in (files if isinstance(files, Mapping) else dict.fromkeys(files, "")).items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    return directory


def write_program(path: Path, script: str) -> Path:
    """Write a shell script that can be run by its path."""
    write_files(path.parent, {path.name: f"#!/bin/sh\n{script}\n"})
    path.chmod(0o755)
    return path
