"""Moves staged packages to their destination, each in one step.

Packages are assembled in a staging directory inside their destination. A package then takes the place of an older one
in one system call, so that a reader finds the old package or the new one. Foreign files in that place are an error.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kernel_format.errors import PackageError
from kernel_format.files import locked, remove_tree, take_name
from kernel_format.metadata import NAME, PackageMetadata

_STAGING = ".staging-"


@contextmanager
def staging(destination: Path) -> Iterator[Path]:
    """Create a directory from which `publish` moves packages to `destination`, and remove it at the end.

    A lock lets one build at a time have such a directory, also among builds with different caches. Directories of
    killed builds are removed.
    """
    created = not destination.exists()
    try:
        destination.mkdir(parents=True, exist_ok=True)
        with locked(destination / ".lock", remove=True):
            for stale in destination.glob(f"{_STAGING}*"):
                remove_tree(stale)
            directory = Path(tempfile.mkdtemp(prefix=_STAGING, dir=destination))
            try:
                yield directory
            finally:
                remove_tree(directory)
    except OSError as error:
        raise PackageError(
            f"the package cannot be written: {error.strerror}",
            where=str(error.filename or destination),
            hint="free some space, change the permissions, or choose another destination with --out; the old packages "
            "stay",
        ) from error
    finally:
        if created and destination.is_dir() and not any(destination.iterdir()):
            destination.rmdir()


def publish(staged: Path, destination: Path, *, outdated: Sequence[str] = ()) -> None:
    """Move the packages of `staged` to `destination`."""
    for package in sorted(staged.iterdir()):
        take_name(package, destination / package.name)
    for name in outdated:
        (destination / name).rename(staged / f"{name}.outdated")


def check_replaced(destination: Path, names: Iterable[str], kernel: str | None = None) -> None:
    """Raise a PackageError if the place of one of these packages has other files.

    Args:
        kernel: The name that the packages there must have, if they have one; None for any.
    """
    for name in names:
        place = destination / name
        if os.path.lexists(place) and not _is_package(place):
            hint = "move or remove it, or choose another destination with --out"
            raise PackageError("is not a package, and the new package would replace it", where=str(place), hint=hint)
        metadata = PackageMetadata.read(place) if kernel else None
        if metadata and metadata.name not in {None, kernel}:
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
