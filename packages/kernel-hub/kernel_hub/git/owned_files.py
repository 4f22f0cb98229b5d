"""The large files that one git repository owns, and those that its commits point to.

A large file is served from a repository only if it was uploaded to that repository: the digest of a private file is
not enough to read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pygit2

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
        walk = self._git.walk(None)
        for ref in self._refs:
            walk.push(ref.commit)
        pending: list[pygit2.Object] = [commit.tree for commit in walk]
        seen: set[pygit2.Oid] = set()
        while pending:
            item = pending.pop()
            if item.id in seen:
                continue
            seen.add(item.id)
            if isinstance(item, pygit2.Tree):
                pending += (inner for inner in item if inner.id not in seen)
            elif (large := tree_entry("", item, self._git.odb).large) is not None:
                yield large
