"""Contents of git blobs on the disk, for slow readers: libgit2 reads a blob as a whole, into memory."""

from __future__ import annotations

import io
import tempfile
from collections import OrderedDict
from pathlib import Path
from threading import Lock
from typing import IO, Any

from kernel_hub.git.objects import TreeEntry
from kernel_hub.git.repository import GitRepository

_KEPT = 16


class BlobSpool:
    """Temporary copies of blobs, without names, in a directory. The last ones are kept open; readers share them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._kept: OrderedDict[str, IO[bytes]] = OrderedDict()
        self._lock = Lock()

    def open(self, repository: GitRepository, entry: TreeEntry) -> IO[bytes]:
        """Open the content of a blob for reading. One blob at a time is in memory."""
        with self._lock:
            if entry.oid not in self._kept:
                content = repository.trees.read(entry)
                try:
                    self._kept[entry.oid] = self._copy(content)
                except OSError:  # the disk is full, but readers are served
                    return io.BytesIO(content)
                if len(self._kept) > _KEPT:
                    self._kept.popitem(last=False)[1].close()
            self._kept.move_to_end(entry.oid)
            # Opened again, since each reader needs a position of its own.
            return Path(f"/proc/self/fd/{self._kept[entry.oid].fileno()}").open("rb")

    def _copy(self, content: bytes) -> Any:
        file = tempfile.TemporaryFile(dir=self._directory)  # noqa: SIM115
        try:
            file.write(content)
            file.flush()
        except OSError:
            file.close()
            raise
        return file
