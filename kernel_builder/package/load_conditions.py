"""What decides whether this machine can load a package, found without importing Torch, which takes seconds."""

from __future__ import annotations

import hashlib
import sys
from functools import cache
from pathlib import Path

_DRIVER = Path("/proc/driver/nvidia/version")


@cache
def load_conditions(cross_python: Path | None = None) -> str:
    """Return a digest of the interpreter, where its modules are, what is installed there, and the GPU's driver.

    Where it has changed, a package that could not be loaded may load.

    Args:
        cross_python: The Python that loads packages for another platform, if there is one.
    """
    digest = hashlib.sha256(sys.version.encode())
    for entry in sys.path:
        directory = Path(entry or ".")
        if directory.is_dir():
            names = sorted(path.name for path in directory.glob("*.dist-info"))
            digest.update("\n".join([str(directory.resolve()), *names]).encode())
    digest.update(_DRIVER.read_bytes() if _DRIVER.is_file() else b"")
    if cross_python:
        digest.update(str(cross_python).encode())
    return digest.hexdigest()
