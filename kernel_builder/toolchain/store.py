"""The toolchain store: directory trees that are complete or absent, named after their content.

    trees/<name>/tree/           the files, read-only
    trees/<name>/manifest.json   SHA-256 and size of each file
    trees/.<name>.new/           an incomplete tree, which nothing reads
    scratch/<name>/              downloads for an incomplete tree
    locks/<name>                 held by the process that fills the tree
    probes/<digest>              answers of programs outside the store (probe_cache.py)

A tree appears by one rename, so every tree without a leading dot is complete even if a process is killed at any time.
The downloads are removed before that: if the tree exists, callers use it without checking further.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kernel_builder.progress import Progress
from kernel_format.errors import StoreError
from kernel_format.files import InUse, file_digest, give_up, locked, writing

_MANIFEST = "manifest.json"
_CLEAN = "run `kernel-builder toolchain clean`; the next build downloads the toolchains again"
_TITLE, _REMEDY = "the toolchain store", "fix its permissions, run `kernel-builder toolchain clean`"


class StoredTree(NamedTuple):
    """A complete tree: its name in messages, and the sum of its files."""

    title: str
    bytes: int


class Store:
    """The trees under one directory. The directory need not exist yet."""

    def __init__(self, root: Path, progress: Progress) -> None:
        self.root = root
        self._progress = progress
        self._checked: set[str] = set()

    def find(self, name: str) -> Path | None:
        """Return the directory of a tree's files, or None if it is not there.

        Raises:
            StoreError: If a file was changed: the keys of steps do not cover it, so that outputs would be wrong.
        """
        home = self._home(name)
        if not (home / _MANIFEST).exists():
            return None
        if name not in self._checked:
            for path, problem in self.damages(name, newer_only=True):
                raise StoreError(f"a file of the toolchain store {problem}", where=str(path), hint=_CLEAN)
            self._checked.add(name)
        return home / "tree"

    def obtain(self, name: str, title: str, make: Callable[[Path, Path], None]) -> Path:
        """Return the directory of a tree's files, and make the tree first if it is not there.

        If another process is making the tree, wait for its result.

        Args:
            title: The name of the tree in messages.
            make: Called with a scratch directory that is kept between attempts, and an empty directory to fill.
        """
        if tree := self.find(name):
            return tree
        home, new, scratch = self._home(name), self._home(f".{name}.new"), self.root / "scratch" / name

        def waiting() -> None:
            self._progress.say(f"{title}: waiting for another process that is making it")

        with writing(self.root, _TITLE, _REMEDY):
            for directory in (home.parent, self.root / "locks"):
                directory.mkdir(parents=True, exist_ok=True)
            with locked(self.root / "locks" / name, waiting=waiting):
                if tree := self.find(name):
                    return tree
                try:
                    self._remove(new)
                    scratch.mkdir(parents=True, exist_ok=True)
                    (new / "tree").mkdir(parents=True)
                    make(scratch, new / "tree")
                    _seal(new, title)
                    self._remove(scratch)
                    new.rename(home)
                finally:
                    self._remove(new)
        return home / "tree"

    def trees(self) -> dict[str, StoredTree]:
        """Return name -> complete tree, sorted by name."""
        stored = {}
        for path in sorted(self.root.glob(f"trees/[!.]*/{_MANIFEST}")):
            try:
                manifest = json.loads(path.read_text())
                size = sum(size for _, size in manifest["files"].values())
                stored[path.parent.name] = StoredTree(manifest["title"], size)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                problem = f"a file of the toolchain store cannot be read: {error!r}"
                raise StoreError(problem, where=str(path), hint=_CLEAN) from error
        return stored

    def damages(self, name: str, *, newer_only: bool = False) -> Iterator[tuple[Path, str]]:
        """Hash every file of a tree again; yield the files that were altered, removed or added, and the problems.

        Args:
            newer_only: Hash only files of another size than the tree's, or newer than the tree.
        """
        home = self._home(name)
        try:
            manifest = json.loads((home / _MANIFEST).read_text())
            files, newest = manifest["files"], manifest["made"] + 1
        except (OSError, ValueError, KeyError, TypeError):
            yield home / _MANIFEST, "is missing or cannot be read"
            return
        present = set(_files(home / "tree"))
        for path, (sha256, size) in files.items():
            if path not in present:
                yield home / "tree" / path, "is missing"
                continue
            status = os.stat(f"{home}/tree/{path}")  # noqa: PTH116  # `Path` takes most of the time of 9,000 files
            if newer_only and status.st_size == size and status.st_mtime <= newest:
                continue
            if (got := file_digest(home / "tree" / path)) != sha256:
                yield home / "tree" / path, f"has SHA-256 {got}, expected {sha256}"
        for path in sorted(present - files.keys()):
            yield home / "tree" / path, "was added"

    def clear(self, before: float = math.inf) -> int:
        """Remove all trees, incomplete downloads and cached probes, without those in use. Return the bytes freed.

        Args:
            before: Remove only files and trees that were last written at an earlier time, in seconds of the epoch.
        """
        freed = 0
        with writing(self.root, _TITLE, _REMEDY):
            for path in [*self.root.glob("trees/*"), *self.root.glob("scratch/*"), *self.root.glob("probes")]:
                name = path.name.removeprefix(".").removesuffix(".new")
                (self.root / "locks").mkdir(exist_ok=True)
                with suppress(InUse), locked(self.root / "locks" / name, waiting=give_up):
                    if not path.exists() or path.stat().st_mtime >= before:
                        continue
                    freed += sum((path / file).stat().st_size for file in _files(path))
                    # Rename first: a tree is complete or gone even if this process is killed while removing it.
                    hidden = path.with_name(f".{name}.new")
                    if path != hidden:
                        self._remove(hidden)
                        path.rename(hidden)
                    self._remove(hidden)
        return freed

    def _home(self, name: str) -> Path:
        return self.root / "trees" / name

    def _remove(self, path: Path) -> None:
        if path.exists():
            shutil.rmtree(path)


def _seal(new: Path, title: str) -> None:
    """Write the manifest and make the files read-only."""
    files = {}
    for name in _files(new / "tree"):
        path = new / "tree" / name
        files[name] = (file_digest(path), path.stat().st_size)
        path.chmod(0o555 if os.access(path, os.X_OK) else 0o444)
    manifest = {"title": title, "made": int(time.time()), "files": files}
    (new / _MANIFEST).write_text(json.dumps(manifest, indent=0) + "\n")


def _files(directory: Path) -> Iterator[str]:
    """Return the names of all files below a directory, sorted."""
    start = len(str(directory)) + 1
    return iter(sorted(f"{home}/{name}"[start:] for home, _, names in os.walk(directory) for name in names))
