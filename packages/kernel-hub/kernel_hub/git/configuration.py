"""The configuration of one git repository, in which the Hub stores its settings of the repository."""

from __future__ import annotations

from pathlib import Path

import pygit2

from kernel_hub.git.command import change_repository


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
