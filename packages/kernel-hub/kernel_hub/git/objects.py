"""The values that the Hub reads from git repositories and writes to them, and the objects of a change in progress."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import pygit2
from pygit2.enums import ObjectType

from kernel_hub.storage.disk import occupied

Result = TypeVar("Result")
Object = TypeVar("Object", pygit2.Commit, pygit2.Tree, pygit2.Blob)

_ATTEMPTS = 8

_POINTER = re.compile(
    rb"version https://git-lfs\.github\.com/spec/v1\noid sha256:([0-9a-f]{64})\nsize (0|[1-9][0-9]{0,18})\n"
)
_POINTER_SIZES = range(120, 160)


@dataclass(frozen=True)
class LargeFile:
    """The target of an LFS pointer."""

    sha256: str
    size: int

    def pointer(self) -> bytes:
        """Return the content of the pointer file."""
        return f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {self.size}\n".encode()


def read_pointer(data: bytes) -> LargeFile | None:
    """Parse an LFS pointer; None if the bytes are not one."""
    matched = _POINTER.fullmatch(data)
    return LargeFile(matched[1].decode(), int(matched[2])) if matched else None


@dataclass(frozen=True)
class TreeEntry:
    """A file or folder of a git tree. `size` is the size of the blob; a large file's blob is its pointer."""

    path: str
    oid: str
    is_folder: bool
    size: int = 0
    large: LargeFile | None = None

    @property
    def content_size(self) -> int:
        """The size in bytes of the content that a reader downloads."""
        return self.large.size if self.large else self.size


def read_header(database: pygit2.Odb, oid: str | pygit2.Oid) -> tuple[int, int]:
    """Return an object's kind and size. pygit2 1.18, the last for Python 3.10, has to read the object."""
    if hasattr(database, "read_header"):
        return database.read_header(oid)
    kind, content = database.read(oid)
    return kind, len(content)


def tree_entry(path: str, item: pygit2.Object, database: pygit2.Odb) -> TreeEntry:
    """Describe a git object that a tree holds at a path. A blob is not read: the database knows its size."""
    if not isinstance(item, pygit2.Blob):
        return TreeEntry(path, str(item.id), is_folder=True)
    size = read_header(database, item.id)[1]
    large = read_pointer(database.read(item.id)[1]) if size in _POINTER_SIZES else None
    return TreeEntry(path, str(item.id), is_folder=False, size=size, large=large)


@dataclass(frozen=True)
class FileChange:
    """One change in a commit: a file to write, with its blob, or a file or folder to delete if `blob` is None."""

    path: str
    blob: str | None = None
    is_folder: bool = False
    large: str | None = None  # the digest of the large file that the blob points to, if it was uploaded before


@dataclass(frozen=True)
class CommitInfo:
    """A commit in a history. `time` is in seconds since 1970."""

    oid: str
    title: str
    message: str
    author: str
    time: int


def commit_info(item: pygit2.Commit) -> CommitInfo:
    """Describe a git commit."""
    title, _, message = _shown(item.raw_message).partition("\n")
    return CommitInfo(str(item.id), title, message.strip(), _shown(item.author.raw_name), item.commit_time)


def _shown(text: bytes) -> str:
    """Return a text of a commit, which `git push` may have written in any encoding."""
    return text.decode("utf-8", "replace").replace("\0", "")


@dataclass(frozen=True)
class PullRequest:
    """A pull request: the branch `base` that it is for, and the commit `head` that it proposes."""

    number: int
    base: str
    head: str
    merged: bool


def one_line(text: str) -> str:
    """Return text that git accepts as a name: without control characters and angle brackets, and not empty."""
    return re.sub(r"[\x00-\x1f<>]", " ", text).strip() or "unknown"


def write_commit(git: pygit2.Repository, parents: list[str], tree: str | pygit2.Oid, message: str, author: str) -> str:
    """Write a commit object that no ref points to yet, and return its id."""
    who = pygit2.Signature(one_line(author), f"{one_line(author)}@hub", int(time.time()), 0)
    content = str(git.create_commit_string(who, who, message, tree, [*parents])).encode()
    # `git.create_commit` of libgit2 1.9 returns an id even if it could not write, as on a full disk.
    return str(retry_reading(lambda: git.odb.write(ObjectType.COMMIT, content)))


def peeled(git: pygit2.Repository, oid: str | pygit2.Oid, kind: type[Object]) -> Object:
    """Return the commit, tree or blob that an object is or leads to."""
    return retry_reading(lambda: git[oid].peel(kind))


def retry_reading(access: Callable[[], Result]) -> Result:
    """Read or write git objects, and try again if `git gc` or `git repack` runs meanwhile.

    They remove empty directories of objects that libgit2 is about to write to, and packs that it is about to read.
    """
    for attempt in range(1, _ATTEMPTS):
        try:
            return access()
        except (pygit2.GitError, OSError, KeyError):
            time.sleep(0.005 * attempt)
    return access()


class NewObjects:
    """The objects of a change in the repository at `path`, which is opened as `git`.

    They enter the repository when all checks have passed, so none are left over. Before, they are in `staging`, the
    directory of changes in progress, on the same disk.
    """

    def __init__(self, git: pygit2.Repository, path: Path, staging: Path) -> None:
        self._git = git
        self._objects = path / "objects"
        self._staging = staging
        self._directory: Path | None = None

    @contextmanager
    def staged(self) -> Iterator[Path]:
        """Write objects to a new directory, which is deleted at the end of the context, or to that of `use`."""
        if self._directory is not None:
            yield self._directory
            return
        with tempfile.TemporaryDirectory(dir=self._staging) as directory:
            self.use(Path(directory))
            yield Path(directory)
        self._directory = None

    def use(self, directory: Path) -> None:
        """Write objects to a directory that another object of the same repository has staged."""
        database = pygit2.Odb()
        database.add_backend(pygit2.OdbBackendLoose(str(directory), -1, False), 1)
        database.add_disk_alternate(str(self._objects))
        self._git.set_odb(database)
        self._directory = directory

    def adopt(self, grow: Callable[[int], None]) -> None:
        """Move the staged objects into the repository. `grow` is called with their bytes on the disk before."""
        if self._directory is None:  # the repository is not visible yet
            return
        new = list(self._directory.glob("??/*"))
        grow(sum(occupied(path.stat().st_size) for path in new))
        for path in new:
            retry_reading(partial(self._move, path))

    def _move(self, path: Path) -> None:
        target = self._objects / path.parent.name / path.name
        target.parent.mkdir(exist_ok=True)
        path.rename(target)
