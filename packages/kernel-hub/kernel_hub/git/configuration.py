"""The configuration of one git repository, in which the Hub stores what is no file and no commit."""

from __future__ import annotations

import pygit2

from kernel_hub.git.lock_files import GitLockFiles


class GitConfiguration:
    """Reads and writes the file `config` of one repository, which is opened as `git`."""

    def __init__(self, git: pygit2.Repository, lock_files: GitLockFiles) -> None:
        self._git = git
        self._lock_files = lock_files

    def get(self, key: str) -> str | None:
        """Return a value, or None if it is not set."""
        config = self._git.config
        return str(config[key]) if key in config else None

    def set(self, key: str, value: str) -> None:
        """Set a value, durably. The caller holds the repository's lock."""
        with self._lock_files.holding("config") as file:
            copy = file.staged.with_name(f"{file.staged.name}-config")
            try:
                copy.write_bytes(file.path.read_bytes())
                pygit2.Config(str(copy))[key] = value
                file.replace(copy.read_bytes())
            finally:
                copy.unlink(missing_ok=True)
