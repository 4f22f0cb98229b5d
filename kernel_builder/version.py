"""Versions: the builder's, and those of installed distributions and programs."""

from importlib.metadata import PackageNotFoundError, version
from subprocess import SubprocessError

from kernel_sandbox.programs import run_program


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
    try:
        done = run_program(program, *arguments)
    except (OSError, SubprocessError):
        return None
    lines = done.stdout.decode(errors="replace").splitlines() if done.returncode == 0 else []
    return lines[0].strip() or None if lines else None
