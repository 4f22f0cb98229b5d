"""Large files, named by their SHA-256.

An upload is written to a staging directory on the same disk and hashed as it arrives. It enters the store by a rename
when it is complete. Names are hashes of the content, so stored files never change and several servers can share the
store.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from kernel_hub import names
from kernel_hub.refusals import bad_request
from kernel_hub.storage.disk import exclusive_lock, private_directory

Stamp = tuple[int, int, int]


class IncomingFile:
    """An upload in progress, which is staged in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self.sha256 = ""  # known after `seal`
        self._hash = hashlib.sha256()
        self._file = path.open("xb")
        self.close = self._file.close

    def write(self, data: bytes) -> None:
        """Append bytes."""
        self.size += len(data)
        self._hash.update(data)
        self._file.write(data)

    def seal(self) -> None:
        """Compute the digest of the complete file, and sync the file to the disk."""
        self.sha256 = self._hash.hexdigest()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def check(self, sha256: str, size: int) -> None:
        """Compare the sealed file with the announced digest and size, or raise a refusal if they differ."""
        if (self.size, self.sha256) != (size, sha256):
            announced = f"not the announced {size} bytes with {sha256}"
            raise bad_request(f"received {self.size} bytes with the SHA-256 {self.sha256}, {announced}")


class LargeFiles:
    """The store of all repositories' large files: `root`, with uploads in progress in `staging`."""

    def __init__(self, root: Path, staging: Path) -> None:
        self._root = root
        self._staging = staging
        private_directory(root)
        private_directory(staging)

    def locked(self) -> AbstractContextManager[None]:
        """Hold the lock of the store, to add or remove files. All uploads wait for it."""
        return exclusive_lock(self._root.with_name("lock"), "the store of large files")

    @contextmanager
    def receive(self, directory: Path | None = None) -> Iterator[IncomingFile]:
        """Begin an upload, by default of its own. Its file is deleted at the end, unless the store adopted it."""
        incoming = IncomingFile((directory or self._staging) / uuid.uuid4().hex)
        try:
            yield incoming
        finally:
            incoming.close()
            incoming.path.unlink(missing_ok=True)

    def adopt(self, incoming: Sequence[IncomingFile]) -> None:
        """Move sealed uploads into the store. The caller holds the lock, and syncs the disk."""
        for file in incoming:
            target = self.path(file.sha256)
            target.parent.mkdir(parents=True, exist_ok=True)
            file.path.replace(target)

    def stamp(self, sha256: str) -> Stamp | None:
        """Return a stored file's inode, time of change and size, which another upload of it changes, or None."""
        try:
            found = self.path(sha256).stat()
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_ctime_ns, found.st_size

    def size(self, sha256: str) -> int | None:
        """Return the size of a stored file in bytes, or None if it is not stored."""
        return stamp[2] if (stamp := self.stamp(sha256)) else None

    def __iter__(self) -> Iterator[str]:
        """The digests of all stored files."""
        return (path.name for path in self._root.glob("*/*/*"))

    def remove(self, sha256: str, stamp: Stamp | None) -> None:
        """Delete a file, unless it was uploaded again since it had this stamp."""
        with self.locked():
            if stamp is not None and self.stamp(sha256) == stamp:
                self.path(sha256).unlink()

    def path(self, sha256: str) -> Path:
        """Return the path of a large file, which may not exist."""
        names.sha256(sha256)
        return self._root / sha256[:2] / sha256[2:4] / sha256
