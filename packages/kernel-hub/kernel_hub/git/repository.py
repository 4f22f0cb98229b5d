"""One git repository of a kernel.

It is a bare repository that `git clone` can read. Large files are LFS pointers in it. The directory `large` holds an
empty file for each large file that was uploaded to this repository, `removed` for each that was permanently deleted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import nullcontext
from pathlib import Path

import pygit2

from kernel_hub.git.commits import GitCommits
from kernel_hub.git.configuration import GitConfiguration
from kernel_hub.git.history import GitHistory
from kernel_hub.git.owned_files import OwnedFiles
from kernel_hub.git.refs import Changing, GitRefs
from kernel_hub.git.rewriting import remove_from_history
from kernel_hub.git.trees import GitTrees

# The root may belong to another user, as mounted volumes do; the operator chose it.
pygit2.settings.owner_validation = False

_PRIVATE = "hub.private"
_MIRROR_OF = "hub.mirrorof"
_FORMER_NAMES = "hub.formernames"
_MOST_FORMER_NAMES = 50


class GitRepository:
    """An opened repository. Not safe for use by two threads at once.

    Attributes:
        refs: Branches, tags and pull requests.
        trees: Files and folders of a revision.
        history: Commits of a revision.
        configuration: What the Hub stores in the repository's configuration.
        commits: Writes commits, and merges.
        owned: The large files that were uploaded to this repository.
    """

    def __init__(self, repo_id: str, path: Path, changing: Changing) -> None:
        self.repo_id = repo_id
        self.path = path
        self._git = pygit2.Repository(str(path), pygit2.enums.RepositoryOpenFlag.BARE)
        self.refs = GitRefs(repo_id, path, self._git, changing)
        self.trees = GitTrees(path, self._git)
        self.history = GitHistory(self._git)
        self.configuration = GitConfiguration(self._git, self.refs.lock_files)
        self.owned = OwnedFiles(path / "large", self._git, self.refs)
        self.commits = GitCommits(repo_id, self._git, self.refs, self.configuration, self.owned)

    @classmethod
    def create(cls, repo_id: str, path: Path, *, private: bool, author: str) -> GitRepository:
        """Create a repository with its first commit at a staging path, which other callers cannot see."""
        pygit2.init_repository(str(path), bare=True, initial_head="main")
        (path / "large").mkdir()
        repository = cls(repo_id, path, lambda *_: nullcontext())
        repository.configuration.set(_PRIVATE, "true" if private else "false")
        repository.commits.create_first(author)
        return repository

    @classmethod
    def create_mirror(cls, repo_id: str, path: Path, url: str) -> GitRepository:
        """Create an empty repository, which is to become a copy of one of another Hub, at a staging path."""
        pygit2.init_repository(str(path), bare=True, initial_head="main")
        (path / "large").mkdir()
        repository = cls(repo_id, path, lambda *_: nullcontext())
        repository.configuration.set(_PRIVATE, "false")
        repository.configuration.set(_MIRROR_OF, url)
        return repository

    @property
    def mirror_of(self) -> str | None:
        """The address of the Hub that this repository is a copy from, or None."""
        return self.configuration.get(_MIRROR_OF)

    @property
    def private(self) -> bool:
        """Whether only callers with a token for the organisation see the repository."""
        return self.configuration.get(_PRIVATE) == "true"

    def set_private(self, private: bool) -> None:
        """Make the repository private or public."""
        with self.refs.locked():
            self.configuration.set(_PRIVATE, "true" if private else "false")

    def former_names(self) -> dict[str, int]:
        """Return the names that redirect to this repository, and when each was given up, in seconds since 1970."""
        recorded = (self.configuration.get(_FORMER_NAMES) or "").split()
        return {name: int(since) for name, _, since in (item.rpartition("@") for item in recorded)}

    def set_former_names(self, former: Mapping[str, int]) -> None:
        """Set the names that redirect to this repository; the oldest are dropped. The caller holds its lock."""
        latest = sorted(former.items(), key=lambda item: item[1])[-_MOST_FORMER_NAMES:]
        self.configuration.set(_FORMER_NAMES, " ".join(f"{name}@{since}" for name, since in latest))

    def delete_large_files(self, sha256s: Collection[str], *, rewrite_history: bool) -> None:
        """Delete large files permanently, and unless they stay as pointers, also from the history."""
        with self.refs.locked():
            if rewrite_history:
                remove_from_history(self._git, self.refs, sha256s)
            self.owned.remove(sha256s)
