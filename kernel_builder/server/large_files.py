"""Large files, named by their SHA-256.

A file arrives in a staging directory on this machine, is hashed as it comes, and enters the store only when its hash
and size are the announced ones. A name in the store is its content, so nothing is ever changed there, and several
servers can share it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import IO

from kernel_builder.server import names
from kernel_builder.server.blobs import Blobs
from kernel_builder.server.refusals import bad_request


class Incoming:
    """A file on its way in. Leaving the context before it was adopted leaves nothing behind."""

    def __init__(self, blobs: Blobs, sha256: str, size: int) -> None:
        self.sha256 = sha256
        self.size = size
        self._hash = hashlib.sha256()
        self._received = 0
        self.path = blobs.new()
        self._file = self.path.open("xb")

    def __enter__(self) -> Incoming:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._file.close()
        finally:
            self.path.unlink(missing_ok=True)

    def write(self, data: bytes) -> None:
        """Take the next bytes."""
        self._received += len(data)
        if self._received > self.size:
            raise bad_request(f"more than the announced {self.size} bytes came for {self.sha256}; nothing was stored")
        self._hash.update(data)
        self._file.write(data)

    def seal(self) -> None:
        """End it: it is whole, it is what was announced, and it is on the disk."""
        if self._received != self.size:
            raise bad_request(
                f"{self._received} of the announced {self.size} bytes came for {self.sha256}; nothing was stored"
            )
        if (found := self._hash.hexdigest()) != self.sha256:
            raise bad_request(f"what came has the SHA-256 {found}, not the announced {self.sha256}; nothing was stored")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


class LargeFiles:
    """The store of all repositories' large files."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs

    def receive(self, sha256: str, size: int) -> Incoming:
        """Begin to take in a file with this digest and size."""
        return Incoming(self._blobs, names.sha256(sha256), size)

    def adopt(self, incoming: Sequence[Incoming]) -> None:
        """Take sealed files into the store, durably."""
        for file in incoming:
            self._blobs.put(file.path, _name(file.sha256))
        self._blobs.sync()

    def size(self, sha256: str) -> int | None:
        """The size of a stored file, or None."""
        return self._blobs.size(_name(sha256))

    def open(self, sha256: str) -> IO[bytes]:
        """A stored file, to read."""
        return self._blobs.open(_name(sha256))

    def __iter__(self) -> Iterator[tuple[str, float]]:
        """The digests of all stored files, and when each came."""
        for name, changed in self._blobs:
            yield name.rpartition("/")[2], changed

    def remove(self, sha256: str) -> None:
        """Remove a file that no repository refers to."""
        self._blobs.remove(_name(sha256))

    def digest(self, sha256: str) -> str:
        """The digest of what is stored under this name; another one means a damaged disk."""
        found = hashlib.sha256()
        with self.open(sha256) as file:
            while block := file.read(1 << 20):
                found.update(block)
        return found.hexdigest()


def _name(sha256: str) -> str:
    names.sha256(sha256)
    return f"{sha256[:2]}/{sha256[2:4]}/{sha256}"
