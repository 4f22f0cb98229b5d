"""Revisions of one git repository: their files and folders, and their history."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import reduce
from itertools import islice

import pygit2
from pygit2.enums import SortMode

from kernel_hub import names
from kernel_hub.git.objects import CommitInfo, TreeEntry, commit_info, peeled, retry_reading, tree_diff, tree_entry
from kernel_hub.refusals import no_entry, too_large

_TREE_BYTES = 64 << 20  # of the folders that one request reads: 0.2 s


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
        top = self.entry(commit, folder) if folder else None
        if top is not None and not top.is_folder:
            raise no_entry(folder, commit)
        tree = peeled(self._git, top.oid if top else commit, pygit2.Tree)
        prefix = f"{folder}/" if folder else ""

        def read() -> list[TreeEntry]:
            return [
                tree_entry(path, item, self._git.odb)
                for path, item in islice(_walk(tree, prefix, recursive), skip, skip + count)
            ]

        return retry_reading(read)

    def entry(self, commit: str, path: str) -> TreeEntry:
        """Return one file or folder of a revision, or raise a refusal if the revision has no such path."""
        names.path(path)
        found = self.find(commit, path)
        if found is None:
            raise no_entry(path, commit)
        return found

    def find(self, commit: str, path: str) -> TreeEntry | None:
        """Return one file or folder of a revision, or None if it does not exist."""
        return self.find_all(commit, [path]).get(path)

    def find_all(self, commit: str, paths: Iterable[str]) -> dict[str, TreeEntry]:
        """Return the existing ones of several files and folders. Each folder is read once: libgit2 parses it whole.

        Raises:
            Refusal: If the folders are too large together.
        """
        trees: dict[pygit2.Oid, pygit2.Tree] = {}
        unread = _TREE_BYTES

        def child(folder: pygit2.Object, name: str) -> pygit2.Object:
            nonlocal unread
            if not isinstance(folder, pygit2.Tree):
                raise KeyError
            if folder.id not in trees:
                trees[folder.id] = folder
                unread -= self._git.odb.read_header(folder.id)[1]
                if unread < 0:
                    raise too_large("the folders of these paths have too many entries: ask for fewer paths")
            return trees[folder.id][name]

        top: pygit2.Object = peeled(self._git, commit, pygit2.Tree)
        found = {}
        for path in set(paths):
            with suppress(KeyError):
                found[path] = tree_entry(path, reduce(child, path.split("/"), top), self._git.odb)
        return found

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
        diff = tree_diff(self._git, start, commit)
        listed = islice(diff.deltas, count)
        return [(delta.status_char(), delta.new_file.path or delta.old_file.path) for delta in listed], len(diff)


def _walk(tree: pygit2.Tree, prefix: str, recursive: bool) -> Iterator[tuple[str, pygit2.Object]]:
    for item in tree:
        path = f"{prefix}{item.name}"
        yield path, item
        if recursive and isinstance(item, pygit2.Tree):
            yield from _walk(item, f"{path}/", recursive)
