"""Large files, named by their SHA-256, in any store that fsspec reaches.

A file arrives in a staging directory on this machine, is hashed as it comes, and enters the store only when its hash
and size are the announced ones: by a rename where the store is this machine's disk, by one upload elsewhere. A name in
the store is its content, so nothing is ever changed there, and several servers can share it.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import fsspec  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

from kernel_builder.hub.server import names
from kernel_builder.hub.server.refusals import bad_request


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Incoming:
    """A file on its way in. Leaving the context without `keep` leaves nothing behind."""

    def __init__(self, store: LargeFiles, sha256: str, size: int) -> None:
        self._store = store
        self._announced = sha256
        self._size = size
        self._hash = hashlib.sha256()
        self._received = 0
        self._path = store.staging / f"{sha256[:16]}-{uuid.uuid4().hex}"
        self._file = self._path.open("xb")

    def __enter__(self) -> Incoming:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)

    @property
    def received(self) -> int:
        """Bytes that came so far."""
        return self._received

    def write(self, data: bytes) -> None:
        """Take the next bytes."""
        self._received += len(data)
        if self._received > self._size:
            raise bad_request(
                f"more than the announced {self._size} bytes came for {self._announced}; nothing was stored"
            )
        self._hash.update(data)
        self._file.write(data)

    def keep(self) -> None:
        """Store the file, durably, if it is the one that was announced."""
        if self._received != self._size:
            raise bad_request(
                f"{self._received} of the announced {self._size} bytes came for {self._announced}; nothing was stored"
            )
        if (found := self._hash.hexdigest()) != self._announced:
            raise bad_request(
                f"what came has the SHA-256 {found}, not the announced {self._announced}; nothing was stored"
            )
        self._file.flush()
        os.fsync(self._file.fileno())
        self._store.adopt(self._path, self._announced)


class LargeFiles:
    """The store.

    Args:
        url: Where the files are, as fsspec reads it: a directory, or e.g. `s3://bucket/prefix`.
        staging: A directory on this machine for what is still coming in.
    """

    def __init__(self, url: str, staging: Path) -> None:
        self.url = url
        self.staging = staging
        staging.mkdir(parents=True, exist_ok=True)
        fs, root = fsspec.core.url_to_fs(url)
        self._fs: Any = fs
        self._root: str = str(root).rstrip("/")
        self._local = isinstance(fs, LocalFileSystem)
        if self._local:
            Path(self._root).mkdir(parents=True, exist_ok=True)

    def _key(self, sha256: str) -> str:
        names.sha256(sha256)
        return f"{self._root}/{sha256[:2]}/{sha256[2:4]}/{sha256}"

    def local_path(self, sha256: str) -> Path | None:
        """Where the file lies on this machine, if the store is a directory."""
        return Path(self._key(sha256)) if self._local else None

    def size(self, sha256: str) -> int | None:
        """The size of a stored file, or None."""
        try:
            if self._local:
                return Path(self._key(sha256)).stat().st_size
            return int(self._fs.size(self._key(sha256)))
        except FileNotFoundError:
            return None

    def receive(self, sha256: str, size: int) -> Incoming:
        """Begin to take in a file with this digest and size."""
        return Incoming(self, names.sha256(sha256), size)

    def adopt(self, path: Path, sha256: str) -> None:
        """Move a whole, verified and synced file of the staging directory into the store."""
        key = self._key(sha256)
        if not self._local:
            self._fs.put_file(str(path), key)
            return
        target = Path(key)
        if not target.parent.is_dir():
            target.parent.mkdir(parents=True, exist_ok=True)
            sync_directory(target.parent.parent)
            sync_directory(target.parent.parent.parent)
        path.replace(target)
        sync_directory(target.parent)

    def open(self, sha256: str) -> IO[bytes]:
        """A stored file, to read."""
        file: IO[bytes] = self._fs.open(self._key(sha256), "rb")
        return file

    def __iter__(self) -> Iterator[str]:
        """The digests of all stored files."""
        for key in self._fs.find(self._root):
            name = str(key).rsplit("/", 1)[-1]
            if len(name) == 64:
                yield name

    def remove(self, sha256: str) -> None:
        """Remove a file that no repository refers to."""
        self._fs.rm_file(self._key(sha256))

    def digest(self, sha256: str) -> str:
        """The digest of what is stored under this name; another one means a damaged disk."""
        found = hashlib.sha256()
        with self.open(sha256) as file:
            while block := file.read(1 << 20):
                found.update(block)
        return found.hexdigest()
