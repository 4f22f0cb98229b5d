"""Applying the changes of a commit to a tree, in time that grows with the changes and not with the repository."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pygit2
from pygit2.enums import FileMode

from kernel_hub import names
from kernel_hub.git.objects import FileChange, peeled, retry_reading
from kernel_hub.refusals import bad_request, no_entry, too_large

_MOST_FOLDERS = 2000  # that a commit changes: each is a new object, which is written under the repository's lock
_FOLDER_BYTES = 2 << 20  # of one folder's entries in git: each request for one of them parses all, in 13 ms


class Folder:
    """A folder that is being changed. Its entries are read when one of them is first needed."""

    def __init__(self, git: pygit2.Repository, oid: pygit2.Oid | None = None) -> None:
        self._git = git
        self._unread = oid
        self.files: dict[str, tuple[pygit2.Oid, FileMode]] = {}
        self.folders: dict[str, Folder] = {}
        self.added: set[str] = set()

    def read(self) -> Folder:
        """Return this folder, ready to be changed."""
        if self._unread is not None:
            for item in peeled(self._git, self._unread, pygit2.Tree):
                assert item.name is not None
                if isinstance(item, pygit2.Tree):
                    self.folders[item.name] = Folder(self._git, item.id)
                else:
                    self.files[item.name] = (item.id, FileMode(item.filemode))
            self._unread = None
        return self

    def ensure(self, parts: Sequence[str]) -> Folder:
        """Return a folder at any depth, and create it if it does not exist."""
        folder = self
        for name in parts:
            if name not in folder.folders:
                folder.folders[name] = Folder(self._git)
                folder.added.add(name)
            folder = folder.folders[name].read()
        return folder

    @property
    def has_files(self) -> bool:
        """Whether there is a file in this folder, at any depth."""
        return self._unread is not None or bool(self.files) or any(folder.has_files for folder in self.folders.values())

    def check(self, path: str = "") -> None:
        """Remove folders without files, and refuse names that exclude each other or are too many."""
        if self._unread is not None:
            return
        self.folders = {name: folder for name, folder in self.folders.items() if folder.has_files}
        for name, folder in self.folders.items():
            if name in self.files:
                raise bad_request(f"{path + name!r} would be both a file and a folder; delete one in this commit")
            folder.check(f"{path}{name}/")
        size = sum(len(name.encode("utf-8", "replace")) + 28 for name in (*self.files, *self.folders))
        if self.added and size > _FOLDER_BYTES:
            where = path or "the top folder"
            raise too_large(f"{where} would have {size} of at most {_FOLDER_BYTES} bytes in git: use more folders")
        folded = sorted((name.casefold(), name) for name in (*self.files, *self.folders))
        for (one, first), (other, second) in pairwise(folded):
            if one == other and {first, second} & self.added:
                raise bad_request(f"{path + first!r} and {second!r} would be one file where case does not count")

    def write(self) -> pygit2.Oid:
        """Write the checked tree, and return its id. Its blobs exist."""
        if self._unread is not None:
            return self._unread
        entries = [(name, oid, mode) for name, (oid, mode) in self.files.items()]
        entries += [(name, folder.write(), FileMode.TREE) for name, folder in self.folders.items()]

        def write() -> pygit2.Oid:
            builder = self._git.TreeBuilder()
            for entry in entries:
                builder.insert(*entry)  # which reads the object
            return builder.write()

        return retry_reading(write)


def add_folders(changed: set[str], path: str) -> int:
    """Add the folders of a changed file to those that a commit changes; return how many were not there.

    Raises:
        Refusal: If there are too many.
    """
    before = len(changed)
    while (path := path.rpartition("/")[0]) not in changed:
        changed.add(path)
    if len(changed) > _MOST_FOLDERS:
        raise too_large(f"more than {_MOST_FOLDERS} changed folders in one commit; make several")
    return len(changed) - before


def changed_tree(git: pygit2.Repository, base: str, changes: Sequence[FileChange]) -> Folder:
    """Apply changes to the tree of a commit, and return the new tree, of which nothing is written yet.

    Raises:
        Refusal: If a change cannot be made: it deletes a missing file, or a file would be a folder as well.
    """
    root = Folder(git, peeled(git, base, pygit2.Tree).id).read()
    for change in changes:
        path = names.path(change.path.rstrip("/"))
        *parents, name = path.split("/")
        folder = root.ensure(parents)
        if change.blob is not None:
            blob = pygit2.Oid(hex=change.blob)
            try:  # an index refuses paths such as git~1, which some file systems take for .git
                pygit2.Index().add(pygit2.IndexEntry(path, blob, FileMode.BLOB))
            except pygit2.GitError:
                raise bad_request(f"path {path!r} is not allowed: git reserves it") from None
            folder.files[name] = (blob, FileMode.BLOB)
            folder.added.add(name)
        elif change.is_folder and name in folder.folders and folder.folders[name].has_files:
            del folder.folders[name]
        elif not change.is_folder and name in folder.files:
            del folder.files[name]
        else:
            kind = "folder" if change.is_folder else "file"
            raise no_entry(f"{path} (A file with this name doesn't exist: there is no such {kind})", base)
    root.check()
    return root
