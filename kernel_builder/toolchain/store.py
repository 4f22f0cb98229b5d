"""A directory of finished trees, each named by what it holds.

    trees/<name>/tree/           the files, read-only
    trees/<name>/manifest.json   what they were when they were made
    trees/.<name>.new/           being made; never looked into
    scratch/<name>/              downloads of a tree being made
    locks/<name>                 held by the process that makes it
    facts/<digest>               what is known of programs outside the store (see facts.py)

A tree appears by one rename, so what is under `trees/` without a leading dot is whole, whenever a process is killed.
Downloads are removed once their tree is made: it is what is used, and it can be checked by its manifest.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kernel_builder.errors import StoreError
from kernel_builder.progress import Progress

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_MANIFEST = "manifest.json"
_CHUNK = 1 << 20


@dataclass(frozen=True)
class StoredTree:
    """A finished tree. `bytes` is the sum of its files, `used` the time of its last use in seconds since 1970."""

    name: str
    title: str
    bytes: int
    files: int
    used: float


@dataclass(frozen=True)
class Damage:
    """A file of a tree that is not what it was when the tree was made."""

    tree: str
    path: Path
    problem: str


class Store:
    """The trees under one directory, which need not exist yet."""

    def __init__(self, root: Path, progress: Progress) -> None:
        self.root = root
        self._progress = progress

    def find(self, name: str) -> Path | None:
        """The files of a tree, or None where it is not there. Marks it as used."""
        home = self._home(name)
        if not (home / _MANIFEST).exists():
            return None
        with suppress(OSError):  # a store that cannot be written serves all the same
            os.utime(home)
        return home / "tree"

    def obtain(self, name: str, title: str, needed: int, make: Callable[[Path, Path], None]) -> Path:
        """The files of a tree, made now if they are not there.

        When another process is making it, waits for that and uses its result.

        Args:
            title: For people.
            needed: Bytes of disk that making it takes.
            make: Called with a scratch directory that is kept between tries, and an empty directory to fill.

        Raises:
            StoreError: If the store cannot be written, or the disk is full; nothing half made is left.
        """
        if found := self.find(name):
            return found
        home, new, scratch = self._home(name), self._home(f".{name}.new"), self.root / "scratch" / name
        with self._writing():
            for directory in (home.parent, scratch, self.root / "locks"):
                directory.mkdir(parents=True, exist_ok=True)
            with self._lock(name, title):
                if found := self.find(name):
                    return found
                try:
                    self._remove(new)
                    scratch.mkdir(parents=True, exist_ok=True)
                    self._check_space(needed - _size(scratch))
                    (new / "tree").mkdir(parents=True)
                    make(scratch, new / "tree")
                    _seal(new, title)
                    new.rename(home)
                except OSError as error:
                    if error.errno not in _FULL:
                        raise
                    full = _no_space(self.root, self.free(), needed)
                    self._remove(scratch)
                    raise full from error
                finally:
                    self._remove(new)
                self._remove(scratch)
        return home / "tree"

    def trees(self) -> list[StoredTree]:
        """Every finished tree, by name."""
        found = []
        for name in self._names():
            home = self._home(name)
            manifest = json.loads((home / _MANIFEST).read_text())
            sizes = [size for _, size in manifest["files"].values()]
            found.append(StoredTree(name, manifest["title"], sum(sizes), len(sizes), home.stat().st_mtime))
        return found

    def verify(self, name: str) -> Iterator[Damage]:
        """Hash every file of a tree again, and give what is altered, missing or was added."""
        home = self._home(name)
        try:
            files = json.loads((home / _MANIFEST).read_text())["files"]
        except (OSError, ValueError, KeyError, TypeError):
            yield Damage(name, home / _MANIFEST, "is missing or cannot be read")
            return
        present = set(_files(home / "tree"))
        for path, (sha256, _) in files.items():
            if path not in present:
                yield Damage(name, home / "tree" / path, "is missing")
            elif (got := _hash(home / "tree" / path)) != sha256:
                yield Damage(name, home / "tree" / path, f"has SHA-256 {got}, expected {sha256}")
        for path in sorted(present - files.keys()):
            yield Damage(name, home / "tree" / path, "was added")

    def names(self) -> list[str]:
        """The names of all finished trees, sorted."""
        return list(self._names())

    def remove(self, name: str) -> bool:
        """Remove a tree, unless a process is making it right now. Returns whether it was removed.

        Raises:
            StoreError: If the store cannot be written.
        """
        from filelock import FileLock, Timeout

        with self._writing():
            try:
                with FileLock(self.root / "locks" / name, timeout=0):
                    # Out of sight first, so that a tree is whole or gone even if this is killed in the middle.
                    hidden = self._home(f".{name}.new")
                    self._remove(hidden)
                    self._home(name).rename(hidden)
                    self._remove(hidden)
            except Timeout:
                return False
        return True

    def remove_leftovers(self) -> int:
        """Remove what interrupted work left, and what is known of programs outside. Returns the bytes freed.

        Raises:
            StoreError: If the store cannot be written.
        """
        from filelock import FileLock, Timeout

        freed = 0
        leftovers = [
            (path.name.removeprefix(".").removesuffix(".new"), path)
            for path in [*self.root.glob("trees/.*.new"), *self.root.glob("scratch/*"), *self.root.glob("facts")]
        ]
        with self._writing():
            for name, path in leftovers:
                try:
                    with FileLock(self.root / "locks" / name, timeout=0):
                        freed += _size(path)
                        self._remove(path)
                except Timeout:
                    continue
        return freed

    def free(self) -> int:
        """Bytes free on the disk of the store."""
        return shutil.disk_usage(self._nearest()).free

    def writable(self) -> bool:
        """Whether a tree could be put into the store, as far as permissions say."""
        return os.access(self._nearest(), os.W_OK | os.X_OK)

    def _nearest(self) -> Path:
        return next(path for path in [self.root, *self.root.absolute().parents] if path.exists())

    def _home(self, name: str) -> Path:
        return self.root / "trees" / name

    def _names(self) -> Iterator[str]:
        for manifest in sorted(self.root.glob(f"trees/*/{_MANIFEST}")):
            if not manifest.parent.name.startswith("."):
                yield manifest.parent.name

    def _remove(self, path: Path) -> None:
        if path.exists():
            shutil.rmtree(path)

    def _check_space(self, needed: int) -> None:
        if (free := self.free()) < needed:
            raise _no_space(self.root, free, needed)

    @contextmanager
    def _lock(self, name: str, title: str) -> Iterator[None]:
        from filelock import FileLock, Timeout

        lock = FileLock(self.root / "locks" / name)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            self._progress.say(f"{title}: waiting for another process that is making it")
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in _FULL:
                raise _no_space(self.root, self.free(), 0) from error
            if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
                raise StoreError(
                    "the toolchain store cannot be written",
                    where=str(error.filename or self.root),
                    hint="set KERNEL_BUILDER_CACHE to a directory of your own, or mend the permissions of this one",
                ) from error
            raise


def _no_space(root: Path, free: int, needed: int) -> StoreError:
    return StoreError(
        f"the disk is full: {free} bytes free, {needed} needed",
        where=str(root),
        hint="make room (`kernel-builder toolchain clean`), or set KERNEL_BUILDER_CACHE to a directory on another disk",
    )


def _seal(new: Path, title: str) -> None:
    """Write the manifest and make the files read-only."""
    files = {}
    for name in _files(new / "tree"):
        path = new / "tree" / name
        files[name] = (_hash(path), path.stat().st_size)
        path.chmod(0o555 if os.access(path, os.X_OK) else 0o444)
    manifest = {"title": title, "made": int(time.time()), "files": files}
    (new / _MANIFEST).write_text(json.dumps(manifest, indent=0) + "\n")


def _files(directory: Path) -> Iterator[str]:
    """The names of all files below a directory, sorted."""
    found = [os.path.join(home, name) for home, _, names in os.walk(directory) for name in names]  # noqa: PTH118
    return iter(sorted(os.path.relpath(path, directory) for path in found))


def _size(path: Path) -> int:
    return sum((path / name).stat().st_size for name in _files(path))


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
