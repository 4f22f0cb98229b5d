"""Revisions of one git repository: their files and folders, and their history."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial, reduce
from itertools import islice
from typing import cast

import pygit2
from pygit2.enums import ObjectType, SortMode

from kernel_hub import names
from kernel_hub.git.command import merge_base
from kernel_hub.git.objects import CommitInfo, TreeEntry, commit_info, peeled, read_header, retry_reading, tree_entry
from kernel_hub.refusals import no_entry, too_large

Id = str | pygit2.Oid

TREE_BYTES = 8 << 20  # of the folders that one request reads: 50 ms
FOLDER_BYTES = 4096  # that a small folder counts: libgit2 takes some 30 µs for it
QUICK_BYTES = 256 << 10  # of those that it reads outside of a long turn
_ENTRY = re.compile(rb"([0-7]+) ([^\0]+)\0(.{20})", re.S)  # of a tree: mode, name and id


class GitRevisions:
    """Reads the revisions of one repository, which is opened as `git`."""

    def __init__(self, git: pygit2.Repository, unread: int = TREE_BYTES) -> None:
        self._git = git
        self.unread = unread  # less those that it has read

    def entries(
        self, commit: str, folder: str = "", *, recursive: bool = False, after: str = "", count: int
    ) -> list[TreeEntry]:
        """List `count` entries of a folder of a revision, in git's order.

        Args:
            after: List only entries beyond this path in the folder; a folder's path ends in a slash.

        Raises:
            Refusal: If there is no such folder, or its folders are too large.
        """
        top = self.entry(commit, folder) if folder else None
        if top is not None and not top.is_folder:
            raise no_entry(folder, commit)
        tree = self._tree(top.oid if top else commit)
        prefix = f"{folder}/" if folder else ""

        def read() -> list[TreeEntry]:
            return [
                tree_entry(path, item, self._git.odb)
                for path, item in islice(self._walk(tree, prefix, recursive, after), count)
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
        top = self._tree(commit)
        trees = {top.id: top}

        def child(folder: pygit2.Object, name: str) -> pygit2.Object:
            if not isinstance(folder, pygit2.Tree):
                raise KeyError
            if folder.id not in trees:
                trees[folder.id] = self._tree(folder.id)
            return trees[folder.id][name]

        found = {}
        for path in set(paths):
            with suppress(KeyError):
                found[path] = tree_entry(path, reduce(child, path.split("/"), cast(pygit2.Object, top)), self._git.odb)
        return found

    def read(self, entry: TreeEntry) -> bytes:
        """Return the content of a file's blob; for a large file that is its pointer."""
        return peeled(self._git, entry.oid, pygit2.Blob).data

    def commits(self, commit: str, *, skip: int = 0, count: int = 50) -> list[CommitInfo]:
        """List the commits up to a revision, newest first."""

        def read() -> list[CommitInfo]:
            walk = self._git.walk(commit, SortMode.NONE)  # by date; other orders read all commits first
            return [commit_info(item) for item in islice(walk, skip, skip + count)]

        return retry_reading(read)

    def last_modified(self, commit: str) -> int:
        """Return when a revision was committed, in seconds since 1970."""
        return peeled(self._git, commit, pygit2.Commit).commit_time

    def changed_files(self, commit: str, since: str | None = None, *, count: int) -> list[tuple[str, str]]:
        """List `count` of the files that a commit changed, each with git's status letter: A, M or D.

        With `since`, a branch's commit, these are all changes since both diverged; else those since the parent.
        """
        start: Id | None = next(iter(peeled(self._git, commit, pygit2.Commit).parent_ids), None)
        if since is not None:
            start = merge_base(self._git.path, since, commit)
        changes = islice(self.changes(start, commit), count)
        return [("M" if old and new else "D" if old else "A", path) for path, old, new in changes]

    def changes(self, old: Id | None, new: Id | None, prefix: str = "") -> Iterator[tuple[str, str | None, str | None]]:
        """Yield path, old blob and new blob of each file that differs between two folders or commits. None: no files.

        A folder is read when the iterator reaches it.
        """
        before, after = (set(_ENTRY.findall(self._tree(side).read_raw())) if side else set() for side in (old, new))
        gone, added = (
            {(name, mode == b"40000"): oid.hex() for mode, name, oid in entries}
            for entries in (before - after, after - before)
        )
        for name, is_folder in sorted(gone.keys() | added.keys()):
            path = prefix + name.decode("utf-8", "surrogateescape")
            sides = gone.get((name, is_folder)), added.get((name, is_folder))
            if is_folder:
                yield from self.changes(*sides, f"{path}/")
            else:
                yield path, *sides

    def _walk(self, tree: pygit2.Tree, prefix: str, recursive: bool, after: str) -> Iterator[tuple[str, pygit2.Object]]:
        first, slash, inside = after.partition("/")
        start = (first + slash).encode()
        places = range(len(tree))
        for place in places[bisect_left(places, start, key=lambda place: _key(tree[place])) :]:
            item = tree[place]
            path = f"{prefix}{item.name}"
            if not (is_start := _key(item) == start):
                yield path, item
            if recursive and isinstance(item, pygit2.Tree):
                yield from self._walk(self._tree(item.id), f"{path}/", recursive, inside if is_start else "")

    def _tree(self, oid: Id) -> pygit2.Tree:
        """Return the folder of a commit or a tree. libgit2 parses it whole, for which all threads wait.

        Raises:
            Refusal: If this request has read too many.
        """
        kind, size = retry_reading(partial(read_header, self._git.odb, oid))
        if kind == ObjectType.COMMIT:
            return self._tree(peeled(self._git, oid, pygit2.Commit).tree_id)
        self.unread -= max(size, FOLDER_BYTES)
        if self.unread < 0:
            most = TREE_BYTES // FOLDER_BYTES
            raise too_large(f"this reads more than {most} folders, or {TREE_BYTES} bytes of them: request fewer")
        return peeled(self._git, oid, pygit2.Tree)


def _key(item: pygit2.Object) -> bytes:
    """Return an entry's name as git sorts it."""
    return (item.raw_name or b"") + b"/" * isinstance(item, pygit2.Tree)
