"""Files and folders of a revision of one git repository."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import pygit2

from kernel_hub import names
from kernel_hub.git.objects import TreeEntry, peeled, retry_reading, tree_entry
from kernel_hub.refusals import Refusal, no_entry


class GitTrees:
    """Reads files and folders of one repository, which is opened as `git`."""

    def __init__(self, git: pygit2.Repository) -> None:
        self._git = git

    def entries(
        self, commit: str, folder: str = "", *, recursive: bool = False, skip: int = 0, count: int
    ) -> list[TreeEntry]:
        """List `count` entries of a folder of a revision, in git's order.

        Raises:
            Refusal: If there is no such folder.
        """
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
        prefix = f"{folder}/" if folder else ""

        def read() -> list[TreeEntry]:
            return [
                tree_entry(path, item.id, self._git.odb, is_folder=isinstance(item, pygit2.Tree))
                for path, item in islice(_walk(tree, prefix, recursive), skip, skip + count)
            ]

        return retry_reading(read)

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
        return tree_entry(path, item.id, self._git.odb, is_folder=not isinstance(item, pygit2.Blob))

    def find(self, commit: str, path: str) -> TreeEntry | None:
        """Return one file or folder of a revision, or None if it does not exist."""
        try:
            return self.entry(commit, path)
        except Refusal:
            return None

    def read(self, entry: TreeEntry) -> bytes:
        """Return the content of a file's blob; for a large file that is its pointer."""
        return peeled(self._git, entry.oid, pygit2.Blob).data


def _walk(tree: pygit2.Tree, prefix: str, recursive: bool) -> Iterator[tuple[str, pygit2.Object]]:
    for item in tree:
        path = f"{prefix}{item.name}"
        yield path, item
        if recursive and isinstance(item, pygit2.Tree):
            yield from _walk(item, f"{path}/", recursive)
