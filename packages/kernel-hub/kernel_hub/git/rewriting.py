"""Rewriting the history of one git repository without some large files."""

from __future__ import annotations

from collections.abc import Collection

import pygit2
from pygit2.enums import FileMode, ObjectType, SortMode

from kernel_hub.git.objects import persistently, tree_entry
from kernel_hub.git.refs import GitRefs


def remove_from_history(git: pygit2.Repository, refs: GitRefs, sha256s: Collection[str]) -> int:
    """Move every ref to a history without these large files; the caller holds the repository's lock.

    A commit that changes keeps its author, its times and its message, and loses its signature. The old commits stay
    until `git gc`. If the process is killed between two refs, the next call moves the others.

    Returns:
        The number of refs that were moved.
    """
    rewritten = _Rewritten(git, frozenset(sha256s))
    tips = [(full, refs.commit_of(full)) for full in refs.names()]
    commits = [commit for _, commit in tips if commit is not None]
    if not commits:
        return 0
    walk = git.walk(commits[0], SortMode.TOPOLOGICAL | SortMode.REVERSE)
    for commit in commits:
        walk.push(commit)
    for item in walk:
        rewritten.add(item)
    moved = 0
    for full, tip in tips:
        target = git.references[full].target  # a commit, or an annotated tag
        new = rewritten.object(git[target])
        if new != target:
            refs.move(full, str(new), tip)
            moved += 1
    return moved


class _Rewritten:
    """The objects that replace those of a history. Parents are added before their children."""

    def __init__(self, git: pygit2.Repository, sha256s: frozenset[str]) -> None:
        self._git = git
        self._database = git.odb
        self._sha256s = sha256s
        self._commits: dict[bytes, bytes] = {}
        self._entries: dict[pygit2.Oid, pygit2.Oid | None] = {}  # trees and blobs; None: nothing is left

    def add(self, commit: pygit2.Commit) -> None:
        """Rewrite a commit."""
        tree = self._entry(commit.tree) or persistently(self._git.TreeBuilder().write)
        head, blank, message = commit.read_raw().partition(b"\n\n")
        lines: list[bytes] = []
        signature = False
        for line in head.split(b"\n"):
            key, _, value = line.partition(b" ")
            signature = key.startswith(b"gpgsig") or (signature and not key)  # its further lines begin with a space
            if key == b"tree":
                lines.append(b"tree " + str(tree).encode())
            elif key == b"parent":
                lines.append(b"parent " + self._commits[value])
            elif not signature:
                lines.append(line)
        before = str(commit.id).encode()
        if tree == commit.tree.id and not any(
            self._commits[str(oid).encode()] != str(oid).encode() for oid in commit.parent_ids
        ):
            self._commits[before] = before
            return
        content = b"\n".join(lines) + blank + message
        self._commits[before] = str(self._written(ObjectType.COMMIT, content)).encode()

    def object(self, item: pygit2.Object) -> pygit2.Oid:
        """Return what replaces a commit that was added, or an annotated tag of one."""
        if not isinstance(item, pygit2.Tag):
            return pygit2.Oid(hex=self._commits[str(item.id).encode()].decode())
        target = self.object(self._git[item.target])
        if target == item.target:
            return item.id
        _, _, rest = item.read_raw().partition(b"\n")
        return self._written(ObjectType.TAG, b"object " + str(target).encode() + b"\n" + rest)

    def _entry(self, item: pygit2.Object) -> pygit2.Oid | None:
        """Return what replaces a folder or a file, or None if it is left out."""
        if item.id not in self._entries:
            self._entries[item.id] = self._folder(item) if isinstance(item, pygit2.Tree) else self._file(item)
        return self._entries[item.id]

    def _file(self, item: pygit2.Object) -> pygit2.Oid | None:
        large = tree_entry("", item.id, self._database, is_folder=False).large
        return None if large is not None and large.sha256 in self._sha256s else item.id

    def _folder(self, tree: pygit2.Tree) -> pygit2.Oid | None:
        builder = self._git.TreeBuilder()
        for item in tree:
            assert item.name is not None
            new = self._entry(item)
            if new is not None:
                builder.insert(item.name, new, FileMode(item.filemode))
        return persistently(builder.write) if len(builder) else None

    def _written(self, kind: ObjectType, content: bytes) -> pygit2.Oid:
        return persistently(lambda: self._git.odb.write(kind, content))
