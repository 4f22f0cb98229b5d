"""Named bytes in any store that fsspec reaches: a directory of this machine, an object store, another host."""

from __future__ import annotations

import ctypes
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import fsspec  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

from kernel_builder.errors import ConfigError

_libc = ctypes.CDLL(None, use_errno=True)
_READ_AHEAD = 4 << 20  # what is fetched at once from a store elsewhere; some would take 50 MB for every reader


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_filesystem(path: Path) -> None:
    """Make everything durable that was written to the file system of a directory: one wait, however many files."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if _libc.syncfs(descriptor):
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), str(path))
    finally:
        os.close(descriptor)


class Blobs:
    """Bytes under names of the form `aa/bb/name`. What is there is whole, and stays as it is.

    Args:
        url: Where they are, as fsspec reads it.
        staging: A directory on this machine, on the disk of `url` if that is a directory.
    """

    def __init__(self, url: str, staging: Path) -> None:
        self.staging = staging
        staging.mkdir(parents=True, exist_ok=True)
        try:
            fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False)  # others write there too
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"this store cannot be reached: {error}",
                where=f"--large-files {url}",
                hint="a directory, or a URL whose package for fsspec is installed: pip install s3fs for s3://",
            ) from error
        self._fs: Any = fs
        self._root: str = str(root).rstrip("/")
        self._local = isinstance(fs, LocalFileSystem)
        if self._local:
            Path(self._root).mkdir(parents=True, exist_ok=True)

    def new(self) -> Path:
        """A path for a file on its way in."""
        return self.staging / uuid.uuid4().hex

    def put(self, path: Path, name: str) -> None:
        """Move a whole and synced file of `staging` here: by a rename on this machine, by one upload elsewhere.

        Its name is durable after `sync`.
        """
        key = f"{self._root}/{name}"
        if not self._local:
            self._fs.put_file(str(path), key)
            path.unlink()
            return
        target = Path(key)
        target.parent.mkdir(parents=True, exist_ok=True)
        path.replace(target)

    def sync(self) -> None:
        """Make the names of all that was put here durable."""
        if self._local:
            sync_filesystem(Path(self._root))

    def size(self, name: str) -> int | None:
        """How many bytes are there, or None."""
        try:
            if self._local:
                return Path(self._root, name).stat().st_size
            return int(self._fs.size(f"{self._root}/{name}"))
        except FileNotFoundError:
            return None

    def open(self, name: str) -> IO[bytes]:
        """What is there, to read."""
        if self._local:
            return Path(self._root, name).open("rb")
        file: IO[bytes] = self._fs.open(f"{self._root}/{name}", "rb", block_size=_READ_AHEAD)
        return file

    @contextmanager
    def on_this_machine(self, name: str) -> Iterator[IO[bytes]]:
        """What is there, to read back and forth."""
        if self._local:
            with Path(self._root, name).open("rb") as file:
                yield file
            return
        copy = self.new()
        try:
            self._fs.get_file(f"{self._root}/{name}", str(copy))
            with copy.open("rb") as file:
                yield file
        finally:
            copy.unlink(missing_ok=True)

    def used(self, name: str) -> None:
        """Note that this was used just now, where the store can."""
        if self._local:
            Path(self._root, name).touch()

    def __iter__(self) -> Iterator[tuple[str, float]]:
        """Every name, and when it was last changed or used, in seconds since 1970."""
        for key, details in self._fs.find(self._root, detail=True).items():
            changed = details.get("mtime") or details.get("LastModified") or 0
            stamp = float(changed) if isinstance(changed, (int, float)) else changed.timestamp()
            yield str(key)[len(self._root) + 1 :], stamp

    def remove(self, name: str) -> None:
        """Remove what is there."""
        self._fs.rm_file(f"{self._root}/{name}")
