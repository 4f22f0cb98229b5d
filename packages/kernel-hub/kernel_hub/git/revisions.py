"""Revisions of one git repository: their files and folders, and their history."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import pygit2
from pygit2.enums import SortMode

from kernel_hub import names
from kernel_hub.git.objects import CommitInfo, TreeEntry, commit_info, peeled, retry_reading, tree_entry
from kernel_hub.refusals import Refusal, no_entry


class GitRevisions:
    """Reads the revisions of one repository, which is opened as `git`."""

    def __init__(self, git: pygit2.Repository) -> None:
        self._git = git

    def entries(
        self, commit: str, folder: str = "", *, recursive: bool = False, skip: int = 0, count: int
    ) -> list[TreeEntry]:
        """List `count` entries of a folder of a revision, in git's order.

        Raises:
            Refusal: If there is no such folder.
        """
        tree = self._object(commit, folder) if folder else peeled(self._git, commit, pygit2.Tree)
        if not isinstance(tree, pygit2.Tree):
            raise no_entry(folder, commit)
        prefix = f"{folder}/" if folder else ""

        def read() -> list[TreeEntry]:
            return [
                tree_entry(path, item.id, self._git.odb, is_folder=isinstance(item, pygit2.Tree))
                for path, item in islice(_walk(tree, prefix, recursive), skip, skip + count)
            ]

        return retry_reading(read)

    def entry(self, commit: str, path: str) -> TreeEntry:
        """Return one file or folder of a revision, or raise a refusal if the revision has no such path."""
        item = self._object(commit, path)
        return tree_entry(path, item.id, self._git.odb, is_folder=not isinstance(item, pygit2.Blob))

    def _object(self, commit: str, path: str) -> pygit2.Object:
        names.path(path)
        try:
            return peeled(self._git, commit, pygit2.Tree)[path]
        except KeyError:
            raise no_entry(path, commit) from None

    def find(self, commit: str, path: str) -> TreeEntry | None:
        """Return one file or folder of a revision, or None if it does not exist."""
        try:
            return self.entry(commit, path)
        except Refusal:
            return None

    def read(self, entry: TreeEntry) -> bytes:
        """Return the content of a file's blob; for a large file that is its pointer."""
        return peeled(self._git, entry.oid, pygit2.Blob).data

    def commits(self, commit: str, *, skip: int = 0, count: int = 50) -> list[CommitInfo]:
        """List the commits up to a revision, newest first."""

        def read() -> list[CommitInfo]:
            walk = self._git.walk(commit, SortMode.TOPOLOGICAL)
            return [commit_info(item) for item in islice(walk, skip, skip + count)]

        return retry_reading(read)

    def last_modified(self, commit: str) -> int:
        """Return when a revision was committed, in seconds since 1970."""
        return peeled(self._git, commit, pygit2.Commit).commit_time

    def changed_files(self, commit: str, since: str | None = None, *, count: int) -> tuple[list[tuple[str, str]], int]:
        """List `count` of the files that a commit changed, each with git's status letter (A, M or D), and count all.

        Args:
            commit: The commit.
            since: A branch's commit: list all changes since `commit` and this one diverged. None: since the parent.
        """
        changed = peeled(self._git, commit, pygit2.Commit)
        start: str | pygit2.Oid | None = changed.parents[0].id if changed.parents else None
        if since is not None:
            start = self._git.merge_base(since, commit)
        before = None if start is None else peeled(self._git, start, pygit2.Tree)
        diff = changed.tree.diff_to_tree(swap=True) if before is None else before.diff_to_tree(changed.tree)
        listed = islice(diff.deltas, count)
        return [(delta.status_char(), delta.new_file.path or delta.old_file.path) for delta in listed], len(diff)


def _walk(tree: pygit2.Tree, prefix: str, recursive: bool) -> Iterator[tuple[str, pygit2.Object]]:
    for item in tree:
        path = f"{prefix}{item.name}"
        yield path, item
        if recursive and isinstance(item, pygit2.Tree):
            yield from _walk(item, f"{path}/", recursive)
