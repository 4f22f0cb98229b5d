"""Writes new files into a directory, and never over one that exists."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kernel_format.errors import ConfigError
from kernel_format.files import write_atomically


def write_new(directory: Path, files: Mapping[str, str]) -> list[str]:
    """Write the files, all or none; return their names.

    Raises:
        ConfigError: If one exists.
    """
    there = [name for name in files if (directory / name).exists() or (directory / name).is_symlink()]
    if there:
        raise ConfigError(
            f"has {' and '.join(there)} already, which are kept",
            where=str(directory),
            hint="add --dry-run to see what would be written, or move the file away",
        )
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(directory / name, content)
    return list(files)
