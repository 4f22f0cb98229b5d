"""The conditions under which this machine can load packages, without importing Torch, which takes seconds."""

from __future__ import annotations

import hashlib
import sys
from functools import cache
from pathlib import Path

_DRIVER = Path("/proc/driver/nvidia/version")


@cache
def load_conditions() -> str:
    """Return a digest of the interpreter, its module path, the installed distributions, and the GPU's driver.

    If it changes, a package that could not be loaded before may load.
    """
    digest = hashlib.sha256(sys.version.encode())
    for entry in sys.path:
        directory = Path(entry or ".")
        if directory.is_dir():
            names = sorted(path.name for path in directory.glob("*.dist-info"))
            digest.update("\n".join([str(directory.resolve()), *names]).encode())
    digest.update(_DRIVER.read_bytes() if _DRIVER.is_file() else b"")
    return digest.hexdigest()
