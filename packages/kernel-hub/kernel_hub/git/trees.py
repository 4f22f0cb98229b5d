"""Files and folders of a revision of one git repository.

Trees of git can be hostile: a few hundred bytes stand for billions of files if every folder is the same one. So each
walk has a limit of entries and of depth, and what is kept of lists has a limit in bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Lock
from typing import overload

import pygit2
from pygit2.enums import FileMode

from kernel_hub import names
from kernel_hub.git.objects import TreeEntry, entry_name, peeled, persistently, tree_entry
from kernel_hub.refusals import Refusal, no_entry, too_large

MOST_ENTRIES = 250_000  # of one list: 60 MB
MOST_DEPTH = 2 * names.MAX_DEPTH  # of another Hub's trees; those of this Hub have half of it
KEPT_BYTES = 64 << 20  # of all lists that are kept
BLOB_BYTES = 64 << 20  # of a blob that is read as a whole; those of this Hub have 10 MB

_Listed = tuple[Sequence[str], bytes, bytes]  # paths, ids, and 1 for each folder

_OID_BYTES = 20
_BYTES_OF_PATH = 66  # of a Python object and its place in a list, without the characters


class Listing(Sequence[TreeEntry]):
    """The entries of a tree. Only paths and ids are kept; the rest is read from git when an entry is asked for."""

    def __init__(self, git: pygit2.Repository, listed: _Listed, prefix: str = "") -> None:
        self._git = git
        self._paths, self._oids, self._folders = listed
        self._prefix = prefix

    def __len__(self) -> int:
        return len(self._paths)

    @overload
    def __getitem__(self, place: int) -> TreeEntry: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[TreeEntry]: ...

    def __getitem__(self, place: int | slice) -> TreeEntry | Sequence[TreeEntry]:
        if isinstance(place, slice):
            return [self[index] for index in range(*place.indices(len(self)))]
        path = self._paths[place]
        oid = pygit2.Oid(raw=self._oids[place * _OID_BYTES : (place + 1) * _OID_BYTES])
        is_folder = self._folders[place] == 1
        return persistently(lambda: tree_entry(self._prefix + path, oid, self._git.odb, is_folder=is_folder))

    @property
    def paths(self) -> Iterator[str]:
        """The paths alone, which need not be read from git."""
        return (self._prefix + path for path in self._paths)


class _KeptLists:
    """The lists that were last asked for, up to `KEPT_BYTES`. They never become stale: a tree's id is its hash."""

    def __init__(self) -> None:
        self._lists: OrderedDict[tuple[str, bool], tuple[int, _Listed]] = OrderedDict()
        self._lock = Lock()
        self.size = 0

    def __len__(self) -> int:
        return len(self._lists)

    def get(self, key: tuple[str, bool]) -> _Listed | None:
        with self._lock:
            if (known := self._lists.get(key)) is None:
                return None
            self._lists.move_to_end(key)
            return known[1]

    def keep(self, key: tuple[str, bool], listed: _Listed) -> None:
        paths, oids, folders = listed
        size = sum(map(len, paths)) + len(paths) * _BYTES_OF_PATH + len(oids) + len(folders)
        with self._lock:
            if key in self._lists or size > KEPT_BYTES:
                return
            self._lists[key] = size, listed
            self.size += size
            while self.size > KEPT_BYTES:
                self.size -= self._lists.popitem(last=False)[1][0]


kept = _KeptLists()


class GitTrees:
    """Reads files and folders of one repository, which is opened as `git`."""

    def __init__(self, path: Path, git: pygit2.Repository) -> None:
        self._path = path
        self._git = git

    def entries(self, commit: str, folder: str = "", *, recursive: bool = False) -> Listing:
        """List a folder of a revision.

        Raises:
            Refusal: If there is no such folder, or there is more in it than this Hub lists.
        """
        tree = peeled(self._git, commit, pygit2.Tree)
        if folder:
            names.path(folder)
            try:
                subtree = tree[folder]
            except KeyError:
                raise no_entry(folder, commit) from None
            if not isinstance(subtree, pygit2.Tree):
                raise no_entry(folder, commit)
            tree = subtree
        key = str(tree.id), recursive
        listed = kept.get(key)
        if listed is None:
            listed = persistently(lambda: _listed(tree, recursive))
            kept.keep(key, listed)
        return Listing(self._git, listed, prefix=f"{folder}/" if folder else "")

    def entry(self, commit: str, path: str) -> TreeEntry:
        """Return one file or folder of a revision.

        Raises:
            Refusal: If the revision has no such path.
        """
        names.path(path)
        tree = peeled(self._git, commit, pygit2.Tree)
        try:
            item = tree[path]
        except KeyError:
            raise no_entry(path, commit) from None
        return tree_entry(path, item.id, self._git.odb, is_folder=not isinstance(item, pygit2.Blob))

    def find(self, commit: str, path: str) -> TreeEntry | None:
        """Return one file or folder of a revision, or None if it does not exist."""
        try:
            return self.entry(commit, path)
        except Refusal:
            return None

    def read(self, entry: TreeEntry) -> bytes:
        """Return the content of a file's blob; for a large file that is its pointer.

        Raises:
            Refusal: If it is larger than any that this Hub stores in git.
        """
        if entry.size > BLOB_BYTES:
            raise too_large(f"{entry.path} has {entry.size} bytes in git; at most {BLOB_BYTES} are sent")
        return peeled(self._git, entry.oid, pygit2.Blob).data


def check_size(git: pygit2.Repository, *commits: str) -> None:
    """Check that revisions have no more files and folders than this Hub lists, before libgit2 walks all of them.

    Raises:
        Refusal: If one has more.
    """
    sizes: dict[pygit2.Oid, int] = {}
    for commit in commits:
        _count(peeled(git, commit, pygit2.Tree), sizes, 0)


def _listed(tree: pygit2.Tree, recursive: bool) -> _Listed:
    """List the entries of a tree in git's order, without submodules and names that lead elsewhere."""
    paths: list[str] = []
    oids, folders = bytearray(), bytearray()
    open_folders: list[tuple[str, Iterator[pygit2.Object]]] = [("", iter(tree))]
    while open_folders:
        prefix, items = open_folders[-1]
        for item in items:
            if item.filemode == FileMode.COMMIT or (name := entry_name(item)) is None:
                continue
            path, is_folder = f"{prefix}{name}", isinstance(item, pygit2.Tree)
            paths.append(path)
            oids += item.id.raw
            folders.append(is_folder)
            if len(paths) > MOST_ENTRIES:
                raise _too_many()
            if recursive and isinstance(item, pygit2.Tree):
                if len(open_folders) >= MOST_DEPTH:
                    raise _too_deep()
                open_folders.append((f"{path}/", iter(item)))
                break
        else:
            open_folders.pop()
    return tuple(paths), bytes(oids), bytes(folders)


def _count(tree: pygit2.Tree, sizes: dict[pygit2.Oid, int], depth: int) -> int:
    """Count the files and folders of a tree. A folder that is there several times is read once."""
    if depth > MOST_DEPTH:
        raise _too_deep()
    if tree.id not in sizes:
        count = 0
        for item in tree:
            count += 1
            if isinstance(item, pygit2.Tree):
                count += _count(item, sizes, depth + 1)
            if count > MOST_ENTRIES:
                raise _too_many()
        sizes[tree.id] = count
    return sizes[tree.id]


def _too_many() -> Refusal:
    return too_large(f"this has more than {MOST_ENTRIES} files and folders: list the folders in it one at a time")


def _too_deep() -> Refusal:
    return too_large(f"this has more than {MOST_DEPTH} folders in one another: list them one at a time")
