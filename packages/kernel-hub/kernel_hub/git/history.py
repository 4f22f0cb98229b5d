"""The history of one git repository: commits, and what they changed."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice

import pygit2
from pygit2.enums import SortMode

from kernel_hub import names
from kernel_hub.git.objects import CommitInfo, commit_info, entry_name, peeled, persistently
from kernel_hub.git.trees import check_size

# What `last_changes` does at most, in lookups of a folder in a commit: some 50 ms. A commit costs as much as ten.
_MOST_WORK = 50_000
_WORK_OF_COMMIT = 10


class GitHistory:
    """Reads the commits of one repository, which is opened as `git`."""

    def __init__(self, git: pygit2.Repository) -> None:
        self._git = git

    def commits(self, commit: str, *, skip: int = 0, count: int = 50) -> list[CommitInfo]:
        """List the commits up to a revision, newest first."""

        def read() -> list[CommitInfo]:
            walk = self._git.walk(commit, SortMode.TOPOLOGICAL)
            return [commit_info(item) for item in islice(walk, skip, skip + count)]

        return persistently(read)

    def last_modified(self, commit: str) -> int:
        """Return when a revision was committed, in seconds since 1970."""
        return peeled(self._git, commit, pygit2.Commit).commit_time

    def last_changes(self, commit: str, paths: Sequence[str]) -> dict[str, CommitInfo]:
        """Return, for each of the paths, the commit that last changed it. The revision has all of the paths.

        Paths whose last change is far back in a long history are left out: finding it would take too long.
        """
        root = peeled(self._git, commit, pygit2.Tree)
        pending: dict[str, dict[str, pygit2.Oid]] = {}  # of each folder, what its entries are in this revision
        for path in paths:
            with suppress(KeyError):  # in a tree without order, git does not find all entries
                pending.setdefault(posixpath.dirname(path), {})[posixpath.basename(path)] = root[path].id
        same = {folder: _subtree(root, folder) for folder in pending}
        changes: dict[str, CommitInfo] = {}
        spent = 0
        for item in self._git.walk(commit, SortMode.TOPOLOGICAL):
            spent += _WORK_OF_COMMIT + len(pending)
            if not pending or spent > _MOST_WORK:
                break
            parent = item.parents[0].tree if item.parents else None
            for folder, entries in list(pending.items()):
                tree = None if parent is None else _subtree(parent, folder)
                if tree is not None and tree == same[folder]:
                    continue
                before = {} if tree is None else {entry_name(entry): entry.id for entry in tree}
                spent += len(before)
                for name in [name for name, oid in entries.items() if before.get(name) != oid]:
                    changes[posixpath.join(folder, name)] = commit_info(item)
                    del entries[name]
                same[folder] = tree
                if not entries:
                    del pending[folder]
        return changes

    def changed_files(self, commit: str, since: str | None = None) -> list[tuple[str, str]]:
        """List the files that a commit changed, each with git's status letter: A, M or D.

        Args:
            commit: The commit.
            since: A branch's commit: list all changes since `commit` and this one diverged. None: since the parent.

        Raises:
            Refusal: If one of them has more files than this Hub lists.
        """
        changed = peeled(self._git, commit, pygit2.Commit)
        start: str | pygit2.Oid | None = changed.parents[0].id if changed.parents else None
        if since is not None:
            start = self._git.merge_base(since, commit)
        check_size(self._git, commit, *([] if start is None else [str(start)]))
        before = None if start is None else peeled(self._git, start, pygit2.Tree)
        diff = changed.tree.diff_to_tree(swap=True) if before is None else before.diff_to_tree(changed.tree)
        paths = [os.fsdecode(delta.new_file.raw_path or delta.old_file.raw_path) for delta in diff.deltas]
        return [
            (delta.status_char(), path)
            for delta, path in zip(diff.deltas, paths, strict=True)
            if all(map(names.is_entry, path.split("/")))
        ]


def _subtree(root: pygit2.Tree, folder: str) -> pygit2.Tree | None:
    """Return a folder of a tree, or None if there is none."""
    try:
        subtree = root[folder] if folder else root
    except KeyError:
        return None
    return subtree if isinstance(subtree, pygit2.Tree) else None
