"""Space for uploads: the quota, and the free space of the disk. It is claimed before anything is written."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

from kernel_hub.refusals import over_quota
from kernel_hub.repositories.index import RepositoryIndex


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
    def claim(self, size: int = 0) -> Iterator[Claim]:
        """Claim bytes for an upload; they are given back when the context ends.

        Raises:
            Refusal: If the quota would be exceeded.
            OSError: If the disk has too little space (ENOSPC).
        """
        claim = Claim(self)
        try:
            claim.grow(size)
            yield claim
        finally:
            self.add(-claim.size)

    def check(self, size: int) -> None:
        """Check that so many bytes could be claimed now, as `claim` does."""
        with self.claim(size):
            pass

    def add(self, size: int) -> None:
        """Add to the claimed bytes, or subtract if `size` is negative."""
        with self._lock:
            if size > 0:
                self._check_space(self._claimed + size)
            self._claimed += size

    def _check_space(self, size: int) -> None:
        disk = shutil.disk_usage(self._staging)
        # Claimed bytes may have been written in part, and count twice then: this errs on the safe side.
        if size > disk.free - min(self._reserve, disk.total // 20):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._staging))
        if self._quota is not None and (stored := self._index.stored_bytes()) + size > self._quota:
            raise over_quota(f"this Hub has {stored} of at most {self._quota} bytes, and this would add {size}")


class Claim:
    """The bytes that one upload has claimed."""

    def __init__(self, allowances: Allowances) -> None:
        self._allowances = allowances
        self.size = 0

    def grow(self, size: int) -> None:
        """Claim more bytes."""
        self._allowances.add(size)
        self.size += size
