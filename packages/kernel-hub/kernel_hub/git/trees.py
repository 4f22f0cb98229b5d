"""Files and folders of a revision of one git repository."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import pygit2

from kernel_hub import names
from kernel_hub.git.objects import TreeEntry, peeled, persistently, tree_entry
from kernel_hub.refusals import Refusal, no_entry


class GitTrees:
    """Reads files and folders of one repository, which is opened as `git`."""

    def __init__(self, path: Path, git: pygit2.Repository) -> None:
        self._path = path
        self._git = git

    def entries(self, commit: str, folder: str = "", *, recursive: bool = False) -> Sequence[TreeEntry]:
        """List a folder of a revision."""
        tree = peeled(self._git, commit, pygit2.Tree)
        if folder:
            names.path(folder)
            try:
                subtree = tree[folder]
            except KeyError:
                raise no_entry(folder, commit) from None
            if not isinstance(subtree, pygit2.Tree):
                raise no_entry(folder, commit)
            tree = subtree
        entries = _entries(str(self._path), str(tree.id), recursive)
        return [entry.below(folder) for entry in entries] if folder else entries

    def entry(self, commit: str, path: str) -> TreeEntry:
        """Return one file or folder of a revision.

        Raises:
            Refusal: If the revision has no such path.
        """
        names.path(path)
        tree = peeled(self._git, commit, pygit2.Tree)
        try:
            item = tree[path]
        except KeyError:
            raise no_entry(path, commit) from None
        return tree_entry(path, item, self._git.odb)

    def find(self, commit: str, path: str) -> TreeEntry | None:
        """Return one file or folder of a revision, or None if it does not exist."""
        try:
            return self.entry(commit, path)
        except Refusal:
            return None

    def read(self, entry: TreeEntry) -> bytes:
        """Return the content of a file's blob; for a large file that is its pointer."""
        return peeled(self._git, entry.oid, pygit2.Blob).data


@lru_cache(maxsize=128)
def _entries(path: str, tree: str, recursive: bool) -> tuple[TreeEntry, ...]:
    """List a tree. The result never becomes stale, since a tree's id is a hash of its content."""
    git = pygit2.Repository(path, pygit2.enums.RepositoryOpenFlag.BARE)
    database = git.odb

    def entries(folder: pygit2.Tree, prefix: str) -> Iterator[TreeEntry]:
        for item in folder:
            yield tree_entry(f"{prefix}{item.name}", item, database)
            if recursive and isinstance(item, pygit2.Tree):
                yield from entries(item, f"{prefix}{item.name}/")

    return persistently(lambda: tuple(entries(git[tree].peel(pygit2.Tree), "")))
