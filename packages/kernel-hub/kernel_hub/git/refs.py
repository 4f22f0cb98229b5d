"""Branches, tags and pull requests of one git repository, and the large files that they need.

Every change of a ref holds the repository's lock and is made by `git update-ref`, which takes git's own lock and
compares the ref with its expected value. So `git gc` and `git push` may run in the repository meanwhile. Objects are
synced to the disk before the ref, and the ref before the response. A killed process leaves at most objects that no ref
reaches.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

import pygit2
from pygit2.enums import ObjectType

from kernel_hub import names
from kernel_hub.git.command import change_repository
from kernel_hub.git.objects import LargeFile, NewObjects, one_line, retry_reading, tree_entry
from kernel_hub.refusals import bad_request, conflict, no_revision, too_large
from kernel_hub.storage.disk import BLOCK, repository_lock, sync_filesystem

MOST_REFS = 5000  # of one repository: lists of them, which anyone may request, take 0.2 s
Changing = Callable[[str], AbstractContextManager[None]]
Grow = Callable[[str, int], None]


class GitRefs:
    """The refs of one repository, which is opened as `git`, and the new objects that they will reach."""

    def __init__(
        self, repo_id: str, path: Path, git: pygit2.Repository, changing: Changing, grow: Grow, new: NewObjects
    ) -> None:
        self._repo_id = repo_id
        self._path = path
        self._git = git
        self._changing = changing
        self._grow = partial(grow, repo_id)
        self.new = new

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """The full name and the commit of every branch, tag and pull request, sorted."""
        for full in self.names():
            if (commit := self.commit_of(full)) is not None:  # else just deleted
                yield full, commit

    def names(self) -> list[str]:
        """Return the full names of all refs, sorted."""
        return retry_reading(lambda: sorted(self._git.references))

    def commit_of(self, full: str) -> str | None:
        """Return the commit that a ref points to, or None if there is no such ref."""
        if not names.is_text(full) or not pygit2.reference_is_valid_name(full):
            return None
        ref = retry_reading(lambda: self._git.references.get(full))
        return None if ref is None else str(retry_reading(lambda: ref.peel(pygit2.Commit)).id)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the repository's lock, which every move of a ref needs. At its end, the index reads the repository."""
        with repository_lock(self._path, self._repo_id), self._changing(self._repo_id):
            yield

    def resolve(self, revision: str) -> str:
        """Return the commit of a branch, tag, full ref name or whole commit id: the start of an id could be a tag.

        Raises:
            Refusal: If the repository has no such revision.
        """
        if len(revision) > len("refs/heads/") + names.MAX_REF:
            raise no_revision(self._repo_id, f"{revision[:40]}…")
        is_id = names.COMMIT.fullmatch(revision)  # which no branch and no tag is named
        if is_id and isinstance(retry_reading(lambda: self._git.get(revision)), pygit2.Commit):
            return revision
        is_full = re.fullmatch(r"refs/(heads|tags|pr)/.+", revision)
        for start in ("",) if is_full else ("refs/heads/", "refs/tags/"):
            if (commit := self.commit_of(f"{start}{revision}")) is not None:
                return commit
        raise no_revision(self._repo_id, revision)

    def create_branch(self, name: str, start: str | None, *, overwrite: bool) -> None:
        """Create a branch at a revision (None: `main`)."""
        full = f"refs/heads/{names.new_branch(name)}"
        with self.locked():
            old = self.commit_of(full)
            if old is not None and not overwrite:
                raise conflict(f"Reference already exists: {self._repo_id} has a branch {name!r}")
            self.move(full, self.resolve(start or "main"), old)

    def create_tag(self, name: str, revision: str, message: str | None, author: str) -> None:
        """Tag a revision; with a message, by an annotated tag."""
        full = f"refs/tags/{names.ref_name(name)}"
        with self.new.staged(), self.locked():
            if self.commit_of(full) is not None:
                raise conflict(f"Reference already exists: {self._repo_id} has a tag {name!r}")
            commit = self.resolve(revision)
            if message:
                # Written as an object, so that the ref is moved by `move` as all refs are.
                text = (
                    f"object {commit}\ntype commit\ntag {name}\n"
                    f"tagger {one_line(author)} <{one_line(author)}@hub> {int(time.time())} +0000\n\n{message}\n"
                )
                commit = str(retry_reading(lambda: self._git.odb.write(ObjectType.TAG, text.encode())))
            self.move(full, commit, None)

    def delete(self, kind: str, name: str) -> None:
        """Delete a branch (heads) other than `main`, a tag (tags) or a pull request (pr)."""
        full = f"refs/{kind}/{names.ref_name(name)}"
        if full == "refs/heads/main":
            raise bad_request("the branch 'main' cannot be deleted")
        with self.locked():
            if self.commit_of(full) is None:
                raise no_revision(self._repo_id, full)
            change_repository(self._path, "update-ref", "--stdin", lines=f"delete {full}\n")

    def move(self, full: str, oid: str, old: str | None) -> None:
        """Point a ref at an object, durably, and adopt new objects. The caller holds the lock.

        `old` is the commit that the ref pointed to when the caller decided to move it. None: the ref did not exist.

        Raises:
            Refusal: If another process, such as `git push`, has moved the ref or holds git's lock, or if another ref
                has a name that excludes this one.
        """
        if old is None:
            self._check_free(full)
            self._grow(BLOCK)
        self.new.adopt(self._grow)
        sync_filesystem(self._path)
        command = f"create {full} {oid}\n" if old is None else f"update {full} {oid} {old}\n"
        change_repository(self._path, "update-ref", "--stdin", lines=command)

    def _check_free(self, full: str) -> None:
        """Refuse one ref too many, or one that would be a directory of another, or the same file but for case."""
        if len(others := self.names()) >= MOST_REFS:
            raise too_large(f"{self._repo_id} has {len(others)} branches, tags and pull requests: delete some")
        for known in others:
            one, other = sorted((known.casefold() + "/", full.casefold() + "/"), key=len)
            if other.startswith(one):
                raise conflict(f"{full} cannot exist beside {known}: they would be one file, or one a directory")


class OwnedFiles:
    """The large files that were uploaded to one repository: `markers` holds an empty file for each.

    Only these are served from the repository: the digest of a private file is not enough to read it.
    """

    def __init__(self, markers: Path, git: pygit2.Repository, refs: GitRefs) -> None:
        self.markers = markers
        self._git = git
        self._refs = refs

    def __contains__(self, sha256: str) -> bool:
        return (self.markers / names.sha256(sha256)).exists()

    def add(self, sha256s: Iterable[str]) -> None:
        """Record that large files were uploaded to this repository."""
        for sha256 in sha256s:
            (self.markers / names.sha256(sha256)).touch()

    def referenced(self) -> Iterator[LargeFile]:
        """Find the large files that any commit of any ref points to. Each tree is read once."""
        walk = self._git.walk(None)
        for _, commit in self._refs:
            walk.push(commit)
        pending: list[pygit2.Object] = [commit.tree for commit in walk]
        seen: set[pygit2.Oid] = set()
        while pending:
            item = pending.pop()
            if item.id in seen:
                continue
            seen.add(item.id)
            if isinstance(item, pygit2.Tree):
                pending += (inner for inner in item if inner.id not in seen)
            elif (large := tree_entry("", item, self._git.odb).large) is not None:
                yield large
