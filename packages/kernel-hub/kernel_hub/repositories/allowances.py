"""Space for uploads: quotas, and what is free on the disk. It is claimed before anything is written."""

from __future__ import annotations

import errno
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

from kernel_hub.refusals import over_quota
from kernel_hub.repositories.index import RepositoryIndex
from kernel_hub.settings import Quotas

_EVERYTHING = ""


class Allowances:
    """Claims of this server's uploads in progress, which count like stored bytes.

    Args:
        quotas: The most bytes of a repository, an organisation and the server.
        index: Knows the stored bytes.
        staging: The directory of uploads in progress.
    """

    def __init__(self, quotas: Quotas, index: RepositoryIndex, staging: Path) -> None:
        self._quotas = quotas
        self._index = index
        self._staging = staging
        self._claimed: Counter[str] = Counter()
        self._lock = Lock()

    @contextmanager
    def claim(self, repo_id: str, size: int = 0) -> Iterator[Claim]:
        """Claim bytes for an upload to a repository; they are given back when the context ends.

        Raises:
            Refusal: If a quota would be exceeded.
            OSError: If the disk has too little space (ENOSPC).
        """
        claim = Claim(self, repo_id)
        try:
            claim.grow(size)
            yield claim
        finally:
            self.add(repo_id, -claim.size)

    def check(self, repo_id: str, size: int) -> None:
        """Check that so many bytes could be claimed now, as `claim` does."""
        with self.claim(repo_id, size):
            pass

    def add(self, repo_id: str, size: int) -> None:
        """Add to the claimed bytes, or subtract if `size` is negative."""
        with self._lock:
            if size > 0:
                self._refuse_above(repo_id, size)
            for key in (repo_id, repo_id.partition("/")[0], _EVERYTHING):
                self._claimed[key] += size
                if not self._claimed[key]:
                    del self._claimed[key]

    def _refuse_above(self, repo_id: str, size: int) -> None:
        disk = shutil.disk_usage(self._staging)
        reserve = min(self._quotas.reserve_bytes, disk.total // 20)
        # Claimed bytes may have been written in part, and count twice then: this errs on the safe side.
        if size + self._claimed[_EVERYTHING] > disk.free - reserve:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._staging))
        limits = (self._quotas.repository_bytes, self._quotas.organization_bytes, self._quotas.server_bytes)
        if limits == (None, None, None):
            return
        organization = repo_id.partition("/")[0]
        keys = ((f"the repository {repo_id}", repo_id), (f"the organisation {organization}", organization))
        for limit, stored, (what, key) in zip(
            limits, self._index.sizes(repo_id), (*keys, ("this Hub", _EVERYTHING)), strict=True
        ):
            if limit is not None and stored + self._claimed[key] + size > limit:
                raise over_quota(f"{what} has {stored} of at most {limit} bytes, and this would add {size}")


class Claim:
    """The bytes that one upload has claimed."""

    def __init__(self, allowances: Allowances, repo_id: str) -> None:
        self._allowances = allowances
        self._repo_id = repo_id
        self.size = 0

    def grow(self, size: int) -> None:
        """Claim more bytes."""
        self._allowances.add(self._repo_id, size)
        self.size += size
