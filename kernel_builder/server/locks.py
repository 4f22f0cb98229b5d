"""Locks between threads, processes and machines that share a directory."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kernel_builder.server.refusals import busy, no_repository

LOCK_SECONDS = 30.0


@contextmanager
def file_lock(path: Path, what: str, *, shared: bool = False) -> Iterator[None]:
    """Hold the lock at this path; it is freed when its holder dies."""
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except FileNotFoundError:
        raise no_repository(what) from None
    try:
        until = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise busy(f"{what} is held by others for {LOCK_SECONDS:.0f} s; try again") from None
                time.sleep(0.005)
        if not path.exists():  # deleted while we waited
            raise no_repository(what)
        yield
    finally:
        os.close(descriptor)
