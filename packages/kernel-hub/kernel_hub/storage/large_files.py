"""Large files, named by their SHA-256.

An upload is written to a local staging directory and hashed as it arrives. It enters the store only if its hash and
size are the announced ones. Names are hashes of the content, so stored files never change and several servers can
share the store.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import IO

from kernel_hub import names
from kernel_hub.refusals import bad_request
from kernel_hub.storage.blobs import Blobs


class IncomingFile:
    """An upload in progress. Its staged file is deleted when the context ends, unless the store adopted it."""

    def __init__(self, blobs: Blobs, sha256: str, size: int) -> None:
        self.sha256 = sha256
        self.size = size
        self._hash = hashlib.sha256()
        self._received = 0
        self.path = blobs.new()
        self._file = self.path.open("xb")

    def __enter__(self) -> IncomingFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._file.close()
        finally:
            self.path.unlink(missing_ok=True)

    def write(self, data: bytes) -> None:
        """Append bytes.

        Raises:
            Refusal: If the file becomes larger than announced.
        """
        self._received += len(data)
        if self._received > self.size:
            raise bad_request(
                f"received more than the announced {self.size} bytes for {self.sha256}; nothing was stored"
            )
        self._hash.update(data)
        self._file.write(data)

    def seal(self) -> None:
        """Check the size and hash of the complete file, and sync it to the disk.

        Raises:
            Refusal: If they are not the announced ones.
        """
        if self._received != self.size:
            raise bad_request(
                f"received {self._received} of the announced {self.size} bytes for {self.sha256}; nothing was stored"
            )
        if (actual := self._hash.hexdigest()) != self.sha256:
            raise bad_request(
                f"the received bytes have the SHA-256 {actual}, not the announced {self.sha256}; nothing was stored"
            )
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


class LargeFiles:
    """The store of all repositories' large files."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs

    def receive(self, sha256: str, size: int) -> IncomingFile:
        """Begin the upload of a file with this digest and size."""
        return IncomingFile(self._blobs, names.sha256(sha256), size)

    def adopt(self, incoming: Sequence[IncomingFile]) -> None:
        """Move sealed uploads into the store, durably."""
        for file in incoming:
            self._blobs.put(file.path, _name(file.sha256))
        self._blobs.sync()

    def size(self, sha256: str) -> int | None:
        """Return the size of a stored file in bytes, or None if it is not stored."""
        return self._blobs.size(_name(sha256))

    def open(self, sha256: str) -> IO[bytes]:
        """Open a stored file for reading."""
        return self._blobs.open(_name(sha256))

    def __iter__(self) -> Iterator[tuple[str, float]]:
        """The digests of all stored files, and when each was stored, in seconds since 1970."""
        for name, changed in self._blobs:
            yield name.rpartition("/")[2], changed

    def remove(self, sha256: str) -> None:
        """Delete a file."""
        self._blobs.remove(_name(sha256))

    def digest(self, sha256: str) -> str:
        """Compute the digest of the file stored under this name; a different one means that the disk damaged it."""
        digest = hashlib.sha256()
        with self.open(sha256) as file:
            while block := file.read(1 << 20):
                digest.update(block)
        return digest.hexdigest()


def _name(sha256: str) -> str:
    names.sha256(sha256)
    return f"{sha256[:2]}/{sha256[2:4]}/{sha256}"
