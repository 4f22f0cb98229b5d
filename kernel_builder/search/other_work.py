"""What else runs on the cores of a CPU while a worker is timed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread: others would spin for milliseconds after their work, on the cores of a worker."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def stalled_seconds() -> float:
    """Return for how many seconds, since the system's start, some thread was ready to run and had no core.

    0 where Linux does not count it (https://docs.kernel.org/accounting/psi.html).
    """
    try:
        return int(re.findall(r"^some .*total=(\d+)", Path("/proc/pressure/cpu").read_text())[0]) * 1e-6
    except (OSError, IndexError):
        return 0.0
