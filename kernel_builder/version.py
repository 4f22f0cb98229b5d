"""Versions: the builder's, and those of installed distributions and programs."""

import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version


def installed(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


# None for a source tree that is only on the import path, as in a Nix build.
VERSION = installed("torch-kernel-builder") or "0+unknown"


def first_line(program: str, *arguments: str) -> str | None:
    """Return the first line that a program prints, or None if it is missing, fails or prints nothing."""
    path = shutil.which(program)
    if path is None:
        return None
    try:
        done = subprocess.run([path, *arguments], capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.splitlines()), "").strip() or None
