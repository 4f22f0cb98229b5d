"""The large files that one git repository owns, and those that its commits point to.

A large file is served from a repository only if it was uploaded to that repository: the digest of a private file is
not enough to read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pygit2
from pygit2.enums import SortMode

from kernel_hub import names
from kernel_hub.git.objects import LargeFile, tree_entry
from kernel_hub.git.refs import GitRefs
from kernel_hub.storage.disk import sync_filesystem


class OwnedFiles:
    """The large files that were uploaded to one repository: `markers` holds an empty file for each."""

    def __init__(self, markers: Path, git: pygit2.Repository, refs: GitRefs) -> None:
        self.markers = markers
        self._git = git
        self._refs = refs

    def __contains__(self, sha256: str) -> bool:
        return (self.markers / names.sha256(sha256)).exists()

    def add(self, sha256s: Iterable[str]) -> None:
        """Record, durably, that large files were uploaded to this repository."""
        for sha256 in sha256s:
            (self.markers / names.sha256(sha256)).touch()
        sync_filesystem(self.markers)

    def referenced(self) -> Iterator[LargeFile]:
        """Find the large files that any commit of any ref points to. Each tree is read once."""
        seen: set[pygit2.Oid] = set()
        pending: list[pygit2.Tree] = []
        for ref in self._refs:
            for commit in self._git.walk(ref.commit, SortMode.NONE):
                if commit.id not in seen:
                    seen.add(commit.id)
                    pending.append(commit.tree)
        while pending:
            tree = pending.pop()
            for item in tree if tree.id not in seen else ():
                if isinstance(item, pygit2.Tree):
                    pending.append(item)
                elif item.id not in seen:
                    seen.add(item.id)
                    if (large := tree_entry("", item, self._git.odb).large) is not None:
                        yield large
            seen.add(tree.id)
