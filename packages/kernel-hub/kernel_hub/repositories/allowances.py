"""Space for uploads: the quota, and the free space of the disk. It is claimed as bytes arrive, before they are written.

Announced sizes are compared with the free space only: a slow upload keeps no space from others.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

from kernel_hub.refusals import Refusal
from kernel_hub.repositories.index import RepositoryIndex

Claim = Callable[[int], None]


class Allowances:
    """Claims of this server's uploads in progress, which count like stored bytes.

    Args:
        quota: The most bytes that the Hub stores. None: no limit.
        reserve: The bytes that stay free on the disk, but at most a twentieth of it.
        index: Knows the stored bytes.
        staging: The directory of uploads in progress.
    """

    def __init__(self, quota: int | None, reserve: int, index: RepositoryIndex, staging: Path) -> None:
        self._quota = quota
        self._reserve = reserve
        self._index = index
        self._staging = staging
        self._claimed = 0
        self._lock = Lock()

    @contextmanager
    def claim(self) -> Iterator[Claim]:
        """Return a function that claims bytes of an upload as `check` does, until the context ends."""
        size = 0

        def grow(more: int) -> None:
            nonlocal size
            with self._lock:
                self.check(more)
                self._claimed += more
            size += more

        try:
            yield grow
        finally:
            with self._lock:
                self._claimed -= size

    def check(self, size: int) -> None:
        """Check that so many bytes can be stored now.

        Raises:
            Refusal: If the quota would be exceeded.
            OSError: If the disk has too little space (ENOSPC).
        """
        disk = shutil.disk_usage(self._staging)  # without the claimed bytes, which are written
        if size > disk.free - min(self._reserve, disk.total // 20):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._staging))
        size += self._claimed
        if self._quota is not None and (stored := self._index.stored_bytes()) + size > self._quota:
            message = f"this Hub has {stored} of at most {self._quota} bytes, and this would add {size}"
            advice = "delete something, or ask the operator for a larger quota"
            raise Refusal(413, f"{message}; {advice}", code="QuotaExceeded")
