"""The content of files, local and on a Hub, compared by its digests."""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RemoteFile:
    """A file of a revision. `sha256` is the digest of a large file; any other file is identified by its git `blob`."""

    size: int
    blob: str
    sha256: str | None

    @property
    def identity(self) -> str:
        """A digest that is equal for two files with equal content on Hubs that store it in the same way."""
        return self.sha256 or self.blob


class Content:
    """The content of a local file, or bytes, to upload, hashed as the Hub does."""

    def __init__(self, source: Path | bytes) -> None:
        sha256 = hashlib.sha256()
        self.source = source
        self.size = len(source) if isinstance(source, bytes) else source.stat().st_size
        blob = hashlib.sha1(b"blob %d\0" % self.size)
        with io.BytesIO(source) if isinstance(source, bytes) else source.open("rb") as file:
            while block := file.read(1 << 20):
                sha256.update(block)
                blob.update(block)
        self.sha256 = sha256.hexdigest()
        self.blob = blob.hexdigest()

    def is_in(self, remote: RemoteFile | None) -> bool:
        """Return whether a file of the repository has this content."""
        if remote is None or remote.size != self.size:
            return False
        return remote.sha256 == self.sha256 if remote.sha256 is not None else remote.blob == self.blob
