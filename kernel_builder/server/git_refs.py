"""Branches, tags and pull requests of one git repository.

Every move of a ref holds the repository's lock, compares the ref with the value that was read, and only then moves it.
Objects are synced to the disk before the ref, and the ref before the answer. A killed process leaves at most objects
that no ref reaches.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pygit2
from pygit2.enums import ObjectType

from kernel_builder.server import names
from kernel_builder.server.blobs import sync_filesystem
from kernel_builder.server.git_objects import Ref, one_line, write_commit
from kernel_builder.server.locks import repository_lock
from kernel_builder.server.refusals import bad_request, conflict, no_revision


class GitRefs:
    """The refs of one repository, which is opened as `git`."""

    def __init__(self, repo_id: str, path: Path, git: pygit2.Repository) -> None:
        self._repo_id = repo_id
        self._path = path
        self._git = git

    def __iter__(self) -> Iterator[Ref]:
        """Every branch, tag and pull request, sorted by full name."""
        for full in sorted(self._git.references):
            prefix = next((p for p in ("refs/heads/", "refs/tags/") if full.startswith(p)), None)
            name = full.removeprefix(prefix) if prefix else full
            commit = self._git.references[full].peel(pygit2.Commit)
            yield Ref(name, full, str(commit.id))

    def locked(self) -> AbstractContextManager[None]:
        """Hold the repository's lock, which every move of a ref needs."""
        return repository_lock(self._path, self._repo_id)

    def resolve(self, revision: str) -> str:
        """Return the commit of a branch, tag, full ref name or commit id.

        Raises:
            Refusal: If the repository has no such revision.
        """
        if len(revision) > len("refs/heads/") + names.MAX_REF:
            raise no_revision(self._repo_id, f"{revision[:40]}…")
        if re.fullmatch(r"[0-9a-f]{7,40}", revision):
            try:
                found = self._git.get(revision)
            except ValueError:  # an ambiguous prefix
                found = None
            if isinstance(found, pygit2.Commit):
                return str(found.id)
        if re.fullmatch(r"refs/(heads|tags|pr)/.+", revision) and pygit2.reference_is_valid_name(revision):
            candidates = [revision]
        else:
            candidates = [f"refs/heads/{revision}", f"refs/tags/{revision}"]
        for full in candidates:
            if pygit2.reference_is_valid_name(full) and (ref := self._git.references.get(full)) is not None:
                return str(ref.peel(pygit2.Commit).id)
        raise no_revision(self._repo_id, revision)

    def create_branch(self, name: str, start: str | None, *, empty: bool, overwrite: bool) -> None:
        """Create a branch at a revision (None: `main`), or an empty one."""
        full = f"refs/heads/{names.ref_name(name)}"
        with self.locked():
            if full in self._git.references and not overwrite:
                raise conflict(f"Reference already exists: {self._repo_id} has a branch {name!r}")
            if empty:
                commit = write_commit(self._git, [], self._git.TreeBuilder().write(), "initial commit", "hub")
            else:
                commit = self.resolve(start or "main")
            self.move(full, commit)

    def delete_branch(self, name: str) -> None:
        """Delete a branch other than `main`."""
        if name == "main":
            raise bad_request("the branch 'main' cannot be deleted")
        self._delete(f"refs/heads/{names.ref_name(name)}", name)

    def create_tag(self, name: str, revision: str, message: str | None, author: str) -> None:
        """Tag a revision; with a message, by an annotated tag."""
        full = f"refs/tags/{names.ref_name(name)}"
        with self.locked():
            if full in self._git.references:
                raise conflict(f"Reference already exists: {self._repo_id} has a tag {name!r}")
            commit = self.resolve(revision)
            if message:
                names.text("the tag's message", message)
                # Written as an object, so that the ref is moved by `move` as all refs are.
                text = (
                    f"object {commit}\ntype commit\ntag {name}\n"
                    f"tagger {one_line(author)} <{one_line(author)}@hub> {int(time.time())} +0000\n\n{message}\n"
                )
                self.move(full, str(self._git.odb.write(ObjectType.TAG, text.encode())))
            else:
                self.move(full, commit)

    def delete_tag(self, name: str) -> None:
        """Delete a tag."""
        self._delete(f"refs/tags/{names.ref_name(name)}", name)

    def _delete(self, full: str, name: str) -> None:
        with self.locked():
            if full not in self._git.references:
                raise no_revision(self._repo_id, name)
            self._git.references.delete(full)
            sync_filesystem(self._path)

    def move(self, full: str, oid: str) -> None:
        """Point a ref at an object, durably. The caller holds the lock and has compared the ref."""
        if full not in self._git.references:
            self._check_free(full)
        sync_filesystem(self._path)  # the objects are on the disk before the ref is
        try:
            self._git.references.create(full, oid, force=True)
        except (OSError, pygit2.GitError):
            # This process holds the repository's lock, so git's own lock file was left by a killed process.
            left = self._path / f"{full}.lock"
            if not left.exists():
                raise
            left.unlink()
            self._git.references.create(full, oid, force=True)
        sync_filesystem(self._path)

    def _check_free(self, full: str) -> None:
        """Refuse a ref whose name is a prefix of another's, or has one: git stores refs as files in directories."""
        for known in self._git.references:
            if known.startswith(f"{full}/") or full.startswith(f"{known}/"):
                raise conflict(f"{full} cannot exist beside {known}: one would be a directory of the other")
