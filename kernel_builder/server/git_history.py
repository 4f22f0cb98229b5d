"""The history of one git repository: commits, and what they changed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import pygit2
from pygit2.enums import SortMode

from kernel_builder.server.git_objects import CommitInfo, commit_info


class GitHistory:
    """Reads the commits of one repository, which is opened as `git`."""

    def __init__(self, git: pygit2.Repository) -> None:
        self._git = git

    def commits(self, commit: str, *, skip: int = 0, count: int = 50) -> list[CommitInfo]:
        """List the commits up to a revision, newest first."""
        walk = self._git.walk(commit, SortMode.TOPOLOGICAL)
        return [commit_info(item) for item in islice(walk, skip, skip + count)]

    def last_modified(self, commit: str) -> int:
        """Return when a revision was committed, in seconds since 1970."""
        return self._git[commit].peel(pygit2.Commit).commit_time

    def last_changes(self, commit: str, paths: Sequence[str]) -> dict[str, CommitInfo]:
        """Return, for each of the paths, the commit that last changed it. The revision has all of the paths."""
        pending = {path: self._oid_at(commit, path) for path in paths}
        found: dict[str, CommitInfo] = {}
        for item in self._git.walk(commit, SortMode.TOPOLOGICAL):
            parent = str(item.parents[0].id) if item.parents else None
            for path in list(pending):
                if parent is None or self._oid_at(parent, path) != pending[path]:
                    found[path] = commit_info(item)
                    del pending[path]
            if not pending:
                break
        return found

    def _oid_at(self, commit: str, path: str) -> str | None:
        try:
            return str(self._git[commit].peel(pygit2.Tree)[path].id)
        except KeyError:
            return None

    def changed_files(self, commit: str, since: str | None = None) -> list[tuple[str, str]]:
        """List the files that a commit changed, each with git's status letter: A, M or D.

        Args:
            commit: The commit.
            since: A branch's commit: list all changes since `commit` and this one diverged. None: since the parent.
        """
        found = self._git[commit].peel(pygit2.Commit)
        start: str | pygit2.Oid | None = found.parents[0].id if found.parents else None
        if since is not None:
            start = self._git.merge_base(since, commit)
        before = None if start is None else self._git[start].peel(pygit2.Tree)
        diff = found.tree.diff_to_tree(swap=True) if before is None else before.diff_to_tree(found.tree)
        return [(delta.status_char(), delta.new_file.path or delta.old_file.path) for delta in diff.deltas]
