"""The history of one git repository: commits, and the files that they changed."""

from __future__ import annotations

from itertools import islice

import pygit2
from pygit2.enums import SortMode

from kernel_hub.git.objects import CommitInfo, commit_info, peeled, retry_reading


class GitHistory:
    """Reads the commits of one repository, which is opened as `git`."""

    def __init__(self, git: pygit2.Repository) -> None:
        self._git = git

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
