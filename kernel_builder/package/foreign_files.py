"""Finds foreign files in the places of packages, which the builder does not replace."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from kernel_format.errors import PackageError
from kernel_format.metadata import NAME, PackageMetadata


def is_of(package: Path, kernel: str) -> bool:
    """Return whether a package's metadata names this kernel, or no kernel."""
    metadata = PackageMetadata.read(package)
    return metadata is None or metadata.name in {None, kernel}


def check_replaced(destination: Path, names: Iterable[str], kernel: str | None = None) -> None:
    """Raise a PackageError if the place of one of these packages has other files.

    Args:
        kernel: The name that the packages there must have, if they have one; None for any.
    """
    for name in names:
        place = destination / name
        if os.path.lexists(place) and not _is_package(place):
            raise PackageError(
                "is not a package, and the new package would replace it",
                where=str(place),
                hint="move or remove it, or choose another destination with --out",
            )
        if kernel and not is_of(place, kernel):
            raise PackageError(
                f"is a package of another kernel than {kernel}",
                where=str(place),
                hint="name another directory with --out, or remove the package",
            )


def _is_package(place: Path) -> bool:
    """Return whether a directory is a package, also of a builder that writes no metadata, or has no files."""
    if place.is_symlink() or not place.is_dir():
        return False
    files = [path.name for path in place.rglob("*") if not path.is_dir()]
    return (place / NAME).is_file() or not files or "__init__.py" in files
