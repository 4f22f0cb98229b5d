"""Files by name in any store that fsspec supports: a local directory, an object store, another host."""

from __future__ import annotations

import ctypes
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import fsspec  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

from kernel_format.errors import ConfigError

_libc = ctypes.CDLL(None, use_errno=True)
_READ_AHEAD = 4 << 20  # bytes per request to a remote store; fsspec's default is 50 MB per reader for some stores


def sync_directory(path: Path) -> None:
    """Sync the names in a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_filesystem(path: Path) -> None:
    """Sync the whole file system of a directory to the disk: one wait for any number of files."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if _libc.syncfs(descriptor):
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), str(path))
    finally:
        os.close(descriptor)


def private_directory(path: Path) -> None:
    """Create a directory that only this user may enter, or shut it to others if it exists, whatever the umask."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    _shut(path, 0o700)


def private_file(path: Path) -> None:
    """Create an empty file that only this user may read, or shut it to others if it exists, whatever the umask."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    _shut(path, 0o600)


def _shut(path: Path, mode: int) -> None:
    with suppress(PermissionError):  # it belongs to another user, who has chosen the mode
        if path.stat().st_mode & 0o777 != mode:
            path.chmod(mode)


class Blobs:
    """A store of immutable files under names of the form `aa/bb/name`. Every file in it is complete.

    Args:
        url: A directory, or a URL that fsspec supports.
        staging: A local directory for uploads, on the same disk as `url` if that is a directory.

    Raises:
        ConfigError: If fsspec does not support the URL.
    """

    def __init__(self, url: str, staging: Path) -> None:
        self.staging = staging
        private_directory(staging)
        try:
            fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False)  # other servers write there too
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"this store cannot be opened: {error}",
                where=f"--large-files {url}",
                hint="give a directory, or a URL whose fsspec package is installed: pip install s3fs for s3://",
            ) from error
        self._fs: Any = fs
        self._root: str = str(root).rstrip("/")
        self._local = isinstance(fs, LocalFileSystem)
        if self._local:
            private_directory(Path(self._root))

    def new(self) -> Path:
        """Return a fresh path in the staging directory for an upload."""
        return self.staging / uuid.uuid4().hex

    def put(self, path: Path, name: str) -> None:
        """Move a complete and synced file from `staging` into the store: by a rename, or by an upload if it is remote.

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
        """Sync the names of all files that were put into the store to the disk."""
        if self._local:
            sync_filesystem(Path(self._root))

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes, or None if there is no such file."""
        try:
            if self._local:
                return Path(self._root, name).stat().st_size
            return int(self._fs.size(f"{self._root}/{name}"))
        except FileNotFoundError:
            return None

    def open(self, name: str) -> IO[bytes]:
        """Open a file for sequential reading."""
        if self._local:
            return Path(self._root, name).open("rb")
        file: IO[bytes] = self._fs.open(f"{self._root}/{name}", "rb", block_size=_READ_AHEAD)
        return file

    @contextmanager
    def on_this_machine(self, name: str) -> Iterator[IO[bytes]]:
        """Open a file for random access; a file of a remote store is downloaded first."""
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
        """Record that a file was used now, if the store is local."""
        if self._local:
            Path(self._root, name).touch()

    def __iter__(self) -> Iterator[tuple[str, float]]:
        """Every name, and when its file was last changed or used, in seconds since 1970."""
        for key, details in self._fs.find(self._root, detail=True).items():
            changed = details.get("mtime") or details.get("LastModified") or 0
            stamp = float(changed) if isinstance(changed, (int, float)) else changed.timestamp()
            yield str(key)[len(self._root) + 1 :], stamp

    def sizes(self) -> Iterator[tuple[str, int]]:
        """Every name, and the size of its file in bytes."""
        for key, details in self._fs.find(self._root, detail=True).items():
            yield str(key)[len(self._root) + 1 :], int(details.get("size") or 0)

    def remove(self, name: str) -> None:
        """Delete a file."""
        self._fs.rm_file(f"{self._root}/{name}")
