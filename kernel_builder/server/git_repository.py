"""A git repository of a kernel: refs, trees and commits.

It is a bare repository that `git clone` reads. Large files are LFS pointers in it; `large/` beside the objects holds
an empty file for each large file that was sent to this very repository. Only those are served from it, so that knowing
a digest is not enough to read what someone else keeps private.

Whatever moves a ref holds the repository's lock, compares the ref with what it read, and only then moves it. Objects
are synced before the ref, and the ref before the answer. A process that is killed leaves at most objects that nothing
refers to.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path

import pygit2
from pygit2.enums import FileMode, ObjectType, SortMode

from kernel_builder.server import names
from kernel_builder.server.blobs import sync_directory, sync_filesystem
from kernel_builder.server.locks import file_lock
from kernel_builder.server.refusals import Refusal, bad_request, conflict, moved_meanwhile, no_entry, no_revision

# A root that belongs to another user, as mounted volumes do, is the operator's choice.
pygit2.settings.owner_validation = False

ATTRIBUTES = b"*.so filter=lfs diff=lfs merge=lfs -text\n*.a filter=lfs diff=lfs merge=lfs -text\n"

_POINTER = re.compile(
    rb"version https://git-lfs\.github\.com/spec/v1\noid sha256:([0-9a-f]{64})\nsize (0|[1-9][0-9]{0,18})\n"
)
_POINTER_SIZES = range(120, 160)


@dataclass(frozen=True)
class LargeFile:
    """What an LFS pointer points to."""

    sha256: str
    size: int

    def pointer(self) -> bytes:
        """The pointer, as it stands in the repository."""
        return f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {self.size}\n".encode()


def read_pointer(data: bytes) -> LargeFile | None:
    """The large file that these bytes point to, if they are a pointer."""
    found = _POINTER.fullmatch(data)
    return LargeFile(found[1].decode(), int(found[2])) if found else None


@dataclass(frozen=True)
class Entry:
    """A file or folder of a tree."""

    path: str
    oid: str
    is_folder: bool
    size: int = 0
    large: LargeFile | None = None

    @property
    def content_size(self) -> int:
        """The size of what a reader gets."""
        return self.large.size if self.large else self.size


@dataclass(frozen=True)
class Ref:
    """A branch, a tag or a pull request, and the commit it stands for."""

    name: str
    full: str
    commit: str


@dataclass(frozen=True)
class Change:
    """One step of a commit: a file to put, with the blob that it becomes, or a file or folder to remove."""

    path: str
    blob: str | None = None
    is_folder: bool = False


@dataclass(frozen=True)
class Commit:
    """A commit, as the history shows it."""

    oid: str
    title: str
    message: str
    author: str
    time: int


@dataclass(frozen=True)
class PullRequest:
    """Commits that somebody wishes to see on a branch."""

    number: int
    base: str
    head: str
    merged: bool


class Repository:
    """One repository, opened. Not for use by two threads at once."""

    def __init__(self, repo_id: str, path: Path) -> None:
        self.repo_id = repo_id
        self.path = path
        self._git = pygit2.Repository(str(path), pygit2.enums.RepositoryOpenFlag.BARE)

    # What it is

    @property
    def private(self) -> bool:
        """Whether only those with a token for the organisation may know of it."""
        config = self._git.config
        return "hub.private" in config and config.get_bool("hub.private")

    def set_private(self, private: bool) -> None:
        """Show or hide it."""
        with self.locked():
            self._git.config["hub.private"] = private
            sync_filesystem(self.path)

    # Refs

    def refs(self) -> Iterator[Ref]:
        """Every branch, tag and pull request."""
        for full in sorted(self._git.references):
            prefix = next((p for p in ("refs/heads/", "refs/tags/") if full.startswith(p)), None)
            name = full.removeprefix(prefix) if prefix else full
            commit = self._git.references[full].peel(pygit2.Commit)
            yield Ref(name, full, str(commit.id))

    def resolve(self, revision: str) -> str:
        """The commit that a branch, tag, ref or commit id stands for."""
        if len(revision) > len("refs/heads/") + names.MAX_REF:
            raise no_revision(self.repo_id, f"{revision[:40]}…")
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
        raise no_revision(self.repo_id, revision)

    def create_branch(self, name: str, start: str | None, *, empty: bool, overwrite: bool) -> None:
        """Make a branch at a revision, or with nothing in it."""
        full = f"refs/heads/{names.ref_name(name)}"
        with self.locked():
            if full in self._git.references and not overwrite:
                raise conflict(f"Reference already exists: {self.repo_id} has a branch {name!r}")
            commit = self._write_commit([], self._git.TreeBuilder().write(), "initial commit", "hub") if empty else None
            self._move(full, commit or self.resolve(start or "main"))

    def delete_branch(self, name: str) -> None:
        """Remove a branch; `main` stays."""
        if name == "main":
            raise bad_request("the branch 'main' cannot be deleted")
        self._delete_ref(f"refs/heads/{names.ref_name(name)}", name)

    def create_tag(self, name: str, revision: str, message: str | None, author: str) -> None:
        """Tag a revision."""
        full = f"refs/tags/{names.ref_name(name)}"
        with self.locked():
            if full in self._git.references:
                raise conflict(f"Reference already exists: {self.repo_id} has a tag {name!r}")
            commit = self.resolve(revision)
            if message:
                names.text("the tag's message", message)
                # The object first, and the ref by the one path that moves refs.
                text = (
                    f"object {commit}\ntype commit\ntag {name}\n"
                    f"tagger {_one_line(author)} <{_one_line(author)}@hub> {int(time.time())} +0000\n\n{message}\n"
                )
                self._move(full, str(self._git.odb.write(ObjectType.TAG, text.encode())))
            else:
                self._move(full, commit)

    def delete_tag(self, name: str) -> None:
        """Remove a tag."""
        self._delete_ref(f"refs/tags/{names.ref_name(name)}", name)

    def _delete_ref(self, full: str, name: str) -> None:
        with self.locked():
            if full not in self._git.references:
                raise no_revision(self.repo_id, name)
            self._git.references.delete(full)
            sync_filesystem(self.path)

    def _move(self, full: str, oid: str) -> None:
        """Point a ref at an object, durably. The caller holds the lock and has compared."""
        if full not in self._git.references:
            self._check_free(full)
        sync_filesystem(self.path)  # what the ref will need is on the disk before the ref is
        try:
            self._git.references.create(full, oid, force=True)
        except (OSError, pygit2.GitError):
            # We hold the repository's lock, so a lock file of git at this ref is one that a killed process left.
            left = self.path / f"{full}.lock"
            if not left.exists():
                raise
            left.unlink()
            self._git.references.create(full, oid, force=True)
        sync_filesystem(self.path)

    def _check_free(self, full: str) -> None:
        """Refuse a ref below another one, or above: git keeps them as files and directories."""
        for known in self._git.references:
            if known.startswith(f"{full}/") or full.startswith(f"{known}/"):
                raise conflict(f"{full} cannot be beside {known}: the one would be a directory of the other")

    # Trees

    def entries(self, commit: str, folder: str = "", *, recursive: bool = False) -> Sequence[Entry]:
        """What is in a folder of a revision."""
        tree = self._git[commit].peel(pygit2.Tree)
        if folder:
            names.path(folder)
            try:
                found = tree[folder]
            except KeyError:
                raise no_entry(folder, commit) from None
            if not isinstance(found, pygit2.Tree):
                raise no_entry(folder, commit)
            tree = found
        entries = _entries(str(self.path), str(tree.id), recursive)
        return [_under(folder, entry) for entry in entries] if folder else entries

    def entry(self, commit: str, path: str) -> Entry:
        """One file or folder of a revision."""
        names.path(path)
        try:
            found = self._git[commit].peel(pygit2.Tree)[path]
        except KeyError:
            raise no_entry(path, commit) from None
        return _entry(self._git, path, found)

    def find(self, commit: str, path: str) -> Entry | None:
        """One file or folder of a revision, if it is there."""
        try:
            return self.entry(commit, path)
        except Refusal:
            return None

    def last_commits(self, commit: str, paths: Sequence[str]) -> dict[str, Commit]:
        """The commit that last changed each of the paths, all of which the revision has."""
        pending = {path: self._oid_at(commit, path) for path in paths}
        found: dict[str, Commit] = {}
        for item in self._git.walk(commit, SortMode.TOPOLOGICAL):
            parent = str(item.parents[0].id) if item.parents else None
            for path in list(pending):
                if parent is None or self._oid_at(parent, path) != pending[path]:
                    found[path] = _commit(item)
                    del pending[path]
            if not pending:
                break
        return found

    def _oid_at(self, commit: str, path: str) -> str | None:
        try:
            return str(self._git[commit].peel(pygit2.Tree)[path].id)
        except KeyError:
            return None

    def read(self, entry: Entry) -> bytes:
        """The bytes of a small file."""
        return self._git[entry.oid].read_raw()

    def history(self, commit: str, *, skip: int = 0, count: int = 50) -> list[Commit]:
        """The commits up to a revision, newest first."""
        walk = self._git.walk(commit, SortMode.TOPOLOGICAL)
        return [_commit(item) for item in islice(walk, skip, skip + count)]

    def last_modified(self, commit: str) -> int:
        """When a revision was committed, in seconds since 1970."""
        return self._git[commit].peel(pygit2.Commit).commit_time

    # Large files

    @property
    def large(self) -> Path:
        """One empty file for each large file that was sent to this repository."""
        return self.path / "large"

    def owns(self, sha256: str) -> bool:
        """Whether the large file was sent to this repository."""
        return (self.large / names.sha256(sha256)).exists()

    def own(self, sha256s: Iterable[str]) -> None:
        """Note, durably, that the large files were sent to this repository."""
        for sha256 in sha256s:
            (self.large / names.sha256(sha256)).touch()
        sync_directory(self.large)

    def referenced(self) -> Iterator[LargeFile]:
        """The large files that any commit of any ref points to; each tree is read once."""
        seen: set[pygit2.Oid] = set()
        pending: list[pygit2.Tree] = []
        for ref in self.refs():
            for commit in self._git.walk(ref.commit, SortMode.NONE):
                if commit.id in seen:
                    continue
                seen.add(commit.id)
                pending.append(commit.tree)
        while pending:
            tree = pending.pop()
            if tree.id in seen:
                continue
            seen.add(tree.id)
            for item in tree:
                if isinstance(item, pygit2.Tree):
                    pending.append(item)
                elif item.id not in seen:
                    seen.add(item.id)
                    if (large := _entry(self._git, str(item.name), item).large) is not None:
                        yield large

    # Commits

    def write_blob(self, data: bytes) -> str:
        """Store the bytes of a small file; nothing refers to them yet."""
        return str(self._git.create_blob(data))

    def commit(
        self,
        revision: str,
        changes: Sequence[Change],
        *,
        title: str,
        description: str,
        author: str,
        parent: str | None = None,
        pull_request: bool = False,
    ) -> tuple[str, str]:
        """Make all changes in one commit on a branch, or on a new pull request of it.

        Returns:
            The commit and the full name of the ref that holds it.
        """
        with self.locked():
            if pull_request:
                base = self.resolve(revision)
                full = f"refs/pr/{self._next_pull_request()}"
            else:
                full = revision if revision.startswith("refs/pr/") else f"refs/heads/{names.ref_name(revision)}"
                if not pygit2.reference_is_valid_name(full) or full not in self._git.references:
                    raise no_revision(self.repo_id, revision)
                base = str(self._git.references[full].peel(pygit2.Commit).id)
            if parent is not None and not base.startswith(parent):
                raise moved_meanwhile(revision, base, parent)
            tree = self._apply(base, changes)
            if tree == str(self._git[base].peel(pygit2.Tree).id) and not pull_request:
                return base, full  # nothing changes: the same upload, sent again
            message = f"{title}\n\n{description}".strip() + "\n"
            oid = self._write_commit([base], tree, message, author)
            if pull_request:
                self._git.config[f"pr.{full.rpartition('/')[2]}.base"] = revision
            self._move(full, oid)
            return oid, full

    def pull_request(self, number: int) -> PullRequest:
        """A pull request."""
        head = self.resolve(f"refs/pr/{number}")
        key = f"pr.{number}.base"
        base = str(self._git.config[key]) if key in self._git.config else "main"
        try:
            tip = self.resolve(base)
        except Refusal:  # the branch has gone
            return PullRequest(number, base, head, False)
        return PullRequest(number, base, head, tip == head or self._git.descendant_of(tip, head))

    def merge(self, number: int, author: str) -> str:
        """Bring a pull request onto its branch, and return the commit that the branch is at then."""
        with self.locked():
            wish = self.pull_request(number)
            tip = self.resolve(f"refs/heads/{wish.base}")
            if wish.merged:
                return tip
            if self._git.descendant_of(wish.head, tip):  # nothing has happened on the branch since
                self._move(f"refs/heads/{wish.base}", wish.head)
                return wish.head
            index = self._git.merge_commits(tip, wish.head)
            if index.conflicts is not None:
                paths = sorted({side.path for conflict in index.conflicts for side in conflict if side is not None})
                raise conflict(
                    f"{', '.join(paths[:5])} changed on {wish.base} as well: commit to refs/pr/{number} again"
                )
            tree = index.write_tree(self._git)
            message = f"Merge pull request {number}\n"
            oid = self._write_commit([tip, wish.head], tree, message, author)
            self._move(f"refs/heads/{wish.base}", oid)
            return oid

    def changes(self, commit: str, since: str | None = None) -> list[tuple[str, str]]:
        """The files added (A), modified (M) or deleted (D) since a commit's parent, or since it left `since`."""
        found = self._git[commit].peel(pygit2.Commit)
        start: str | pygit2.Oid | None = found.parents[0].id if found.parents else None
        if since is not None:
            start = self._git.merge_base(since, commit)
        before = None if start is None else self._git[start].peel(pygit2.Tree)
        diff = found.tree.diff_to_tree(swap=True) if before is None else before.diff_to_tree(found.tree)
        return [(delta.status_char(), delta.new_file.path or delta.old_file.path) for delta in diff.deltas]

    def _next_pull_request(self) -> int:
        taken = [int(ref.rsplit("/", 1)[-1]) for ref in self._git.references if ref.startswith("refs/pr/")]
        return max(taken, default=0) + 1

    def _apply(self, base: str, changes: Sequence[Change]) -> str:
        index = pygit2.Index()
        index.read_tree(self._git[base].peel(pygit2.Tree))
        files = {str(entry.path) for entry in index}
        for change in changes:
            path = names.path(change.path.rstrip("/"))
            if change.blob is not None:
                try:
                    index.add(pygit2.IndexEntry(path, pygit2.Oid(hex=change.blob), FileMode.BLOB))
                except pygit2.GitError:  # such as git~1, which is .git on some file systems
                    raise bad_request(f"path {path!r} is not allowed: git takes it for one of its own") from None
                files.add(path)
                continue
            gone = [file for file in files if file.startswith(f"{path}/")] if change.is_folder else [path]
            if not gone or not files.issuperset(gone):
                what = "folder" if change.is_folder else "file"
                raise no_entry(f"{path} (A file with this name doesn't exist: there is no such {what})", base)
            for file in gone:
                index.remove(file)
                files.remove(file)
        for file in files:
            for parent in _parents(file):
                if parent in files:
                    raise bad_request(
                        f"{parent!r} would be both a file and a folder; delete one of them in this commit"
                    )
        return str(index.write_tree(self._git))

    def _write_commit(self, parents: list[str], tree: str | pygit2.Oid, message: str, author: str) -> str:
        who = pygit2.Signature(_one_line(author), f"{_one_line(author)}@hub", int(time.time()), 0)
        return str(self._git.create_commit(None, who, who, message, tree, parents))

    def write_first_commit(self, author: str) -> None:
        """`main`, with the attributes that let `git` with LFS read a clone."""
        blob = self._git.create_blob(ATTRIBUTES)
        builder = self._git.TreeBuilder()
        builder.insert(".gitattributes", blob, FileMode.BLOB)
        self._move("refs/heads/main", self._write_commit([], builder.write(), "initial commit", author))

    def locked(self) -> AbstractContextManager[None]:
        """Hold the repository's lock; whoever moves a ref does."""
        return file_lock(self.path / "lock", self.repo_id)


def _commit(item: pygit2.Commit) -> Commit:
    title, _, message = item.message.partition("\n")
    return Commit(str(item.id), title, message.strip(), item.author.name, item.commit_time)


def _one_line(text: str) -> str:
    return re.sub(r"[\x00-\x1f<>]", " ", text).strip() or "unknown"


def _parents(path: str) -> Iterator[str]:
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path


def _under(folder: str, entry: Entry) -> Entry:
    return Entry(f"{folder}/{entry.path}", entry.oid, entry.is_folder, entry.size, entry.large)


def _entry(git: pygit2.Repository, path: str, item: pygit2.Object) -> Entry:
    if not isinstance(item, pygit2.Blob):
        return Entry(path, str(item.id), is_folder=True)
    size = item.size
    large = read_pointer(item.data) if size in _POINTER_SIZES else None
    return Entry(path, str(item.id), is_folder=False, size=size, large=large)


@lru_cache(maxsize=128)
def _entries(path: str, tree: str, recursive: bool) -> tuple[Entry, ...]:
    """What is in a tree. Its id is its content, so what was read once stays true."""
    git = pygit2.Repository(path, pygit2.enums.RepositoryOpenFlag.BARE)
    found: list[Entry] = []

    def visit(folder: pygit2.Tree, prefix: str) -> None:
        for item in folder:
            entry = _entry(git, f"{prefix}{item.name}", item)
            found.append(entry)
            if recursive and isinstance(item, pygit2.Tree):
                visit(item, f"{prefix}{item.name}/")

    top = git[tree]
    assert isinstance(top, pygit2.Tree)
    visit(top, "")
    return tuple(found)
