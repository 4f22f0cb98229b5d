"""The large files that one git repository owns, and those that its commits point to.

A large file is served from a repository only if it was uploaded to that repository: to know the digest of a private
file is not enough to read it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pygit2
from pygit2.enums import SortMode

from kernel_hub import names
from kernel_hub.git.objects import LargeFile, tree_entry
from kernel_hub.git.refs import GitRefs
from kernel_hub.storage.blobs import sync_directory


@dataclass(frozen=True)
class LocatedFile:
    """A large file, and one path at which a commit of a ref has it."""

    large: LargeFile
    path: str
    ref: str


class OwnedFiles:
    """The large files that were uploaded to one repository: `markers` holds an empty file for each.

    The directory `removed` beside it holds one for each that was permanently deleted. Commits may still point to it.
    """

    def __init__(self, markers: Path, git: pygit2.Repository, refs: GitRefs) -> None:
        self.markers = markers
        self._removed = markers.with_name("removed")
        self._git = git
        self._refs = refs

    def __contains__(self, sha256: str) -> bool:
        return (self.markers / names.sha256(sha256)).exists()

    def add(self, sha256s: Iterable[str]) -> None:
        """Record, durably, that large files were uploaded to this repository."""
        for sha256 in sha256s:
            (self.markers / names.sha256(sha256)).touch()
            (self._removed / sha256).unlink(missing_ok=True)
        sync_directory(self.markers)

    def remove(self, sha256s: Iterable[str]) -> None:
        """Record, durably, that large files were permanently deleted. They are no longer served."""
        self._removed.mkdir(exist_ok=True)
        removed = [names.sha256(sha256) for sha256 in sha256s]
        for sha256 in removed:
            (self._removed / sha256).touch()
        sync_directory(self._removed)
        for sha256 in removed:
            (self.markers / sha256).unlink(missing_ok=True)
        sync_directory(self.markers)

    def removed(self) -> set[str]:
        """Return the digests of the large files that were permanently deleted."""
        return {path.name for path in self._removed.iterdir()} if self._removed.is_dir() else set()

    def referenced(self) -> Iterator[LargeFile]:
        """Find the large files that any commit of any ref points to, without those that were permanently deleted."""
        removed = self.removed()
        return (located.large for located in self.located() if located.large.sha256 not in removed)

    def located(self) -> Iterator[LocatedFile]:
        """Find the large files that any commit of any ref points to, each at one of its places.

        Each tree is read once.
        """
        database = self._git.odb
        seen: set[pygit2.Oid] = set()
        pending: list[tuple[pygit2.Tree, str, str]] = []
        for ref in self._refs:
            for commit in self._git.walk(ref.commit, SortMode.NONE):
                if commit.id in seen:
                    continue
                seen.add(commit.id)
                pending.append((commit.tree, "", ref.full))
        while pending:
            tree, folder, full = pending.pop()
            if tree.id in seen:
                continue
            seen.add(tree.id)
            for item in tree:
                path = f"{folder}{os.fsdecode(item.raw_name or b'')}"
                if isinstance(item, pygit2.Tree):
                    pending.append((item, f"{path}/", full))
                elif item.id not in seen:
                    seen.add(item.id)
                    if (large := tree_entry(path, item.id, database, is_folder=False).large) is not None:
                        yield LocatedFile(large, path, full)
