"""One git repository of a kernel.

It is a bare repository that `git clone` can read. Large files are LFS pointers in it. The directory `large` holds an
empty file for each large file that was uploaded to this repository.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pygit2

from kernel_hub.git.command import GitConfiguration
from kernel_hub.git.commits import GitCommits
from kernel_hub.git.objects import NewObjects
from kernel_hub.git.refs import Changing, GitRefs, Grow, OwnedFiles
from kernel_hub.git.revisions import GitRevisions

# The root may belong to another user, as mounted volumes do; the operator chose it.
pygit2.settings.owner_validation = False

_PRIVATE = "hub.private"


class GitRepository:
    """An opened repository. Not safe for use by two threads at once."""

    def __init__(self, repo_id: str, path: Path, changing: Changing, grow: Grow, staging: Path) -> None:
        self.repo_id = repo_id
        self.path = path
        self._git = pygit2.Repository(str(path), pygit2.enums.RepositoryOpenFlag.BARE)
        self.refs = GitRefs(repo_id, path, self._git, changing, grow, NewObjects(self._git, path, staging))
        self.revisions = GitRevisions(self._git)
        self.configuration = GitConfiguration(path, self._git)
        self.owned = OwnedFiles(path / "large", self._git, self.refs)
        self.commits = GitCommits(repo_id, self._git, self.refs, self.configuration, self.owned)

    @classmethod
    def create(cls, repo_id: str, path: Path, *, private: bool, author: str) -> GitRepository:
        """Create a repository with its first commit at a staging path, which other callers cannot see."""
        pygit2.init_repository(str(path), bare=True, initial_head="main")
        (path / "large").mkdir()
        repository = cls(repo_id, path, lambda _: nullcontext(), lambda *_: None, path)
        repository.configuration.set(_PRIVATE, "true" if private else "false")
        repository.commits.create_first(author)
        return repository

    @property
    def private(self) -> bool:
        """Whether only callers with a token for the organization see the repository."""
        return self.configuration.get(_PRIVATE) == "true"

    def set_private(self, private: bool) -> None:
        """Make the repository private or public. The caller holds the lock."""
        self.configuration.set(_PRIVATE, "true" if private else "false")
