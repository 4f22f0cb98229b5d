"""Finds foreign files in a `build` directory, which the builder neither replaces nor moves."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from kernel_builder.config import known_backends
from kernel_format.errors import PackageError
from kernel_format.metadata import NAME, PackageMetadata
from kernel_format.tree_digest import SIGNATURE

# Includes variants of other builders: `torch28-cxx11-rocm63-x86_64-linux`, `torch-universal`.
_VARIANT = re.compile(
    r"(torch\d+(-cxx\d+)?|torch-stable-abi\d+|tvm-ffi\d+)(-[a-z]+\d*)+-[a-z0-9_]+-[a-z]+"
    rf"|torch-({'|'.join(known_backends.NAMES)}|universal)"
)
# Files that Python and desktops create in any directory.
_LEFTOVERS = {"__pycache__", ".DS_Store"}


def is_variant(name: str) -> bool:
    """Return whether a name is a variant's, so that a directory of this name is in the place of a package."""
    return _VARIANT.fullmatch(name) is not None


def is_package(entry: Path) -> bool:
    """Return whether a directory is a package, or empty in the place of one. A symbolic link is not a package."""
    if entry.is_symlink() or not entry.is_dir() or not is_variant(entry.name):
        return False
    if (entry / NAME).is_file():
        return True
    files = [names for _, _, names in os.walk(entry) if names]
    return not files or any("__init__.py" in names for names in files)


def is_of(package: Path, kernel: str) -> bool:
    """Return whether a package's metadata names this kernel, or no kernel."""
    metadata = PackageMetadata.read(package)
    return metadata is None or metadata.name in {None, kernel}


def foreign_file(entry: Path) -> Path | None:
    """Return a foreign file in the place of a package, or None.

    It may be the entry itself. A file is foreign if the digest in the package's metadata does not list it; without such
    a digest, as in other builders' packages, if it is hidden.
    """
    if not os.path.lexists(entry):
        return None
    if not is_package(entry):
        return entry
    metadata = PackageMetadata.read(entry)
    known = metadata.digest.get("files") if metadata and metadata.digest else None
    return next((path for path in _files(entry) if _is_foreign(path.relative_to(entry).as_posix(), known)), None)


def _files(directory: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(directory):
        hidden = [name for name in folders if name.startswith(".")]
        folders[:] = [name for name in folders if name not in {*_LEFTOVERS, *hidden}]
        yield from (Path(folder, name) for name in sorted([*hidden, *names]) if name not in _LEFTOVERS)


def _is_foreign(name: str, known: object) -> bool:
    if name in {NAME, SIGNATURE} or name.endswith(".pyc"):
        return False
    if isinstance(known, dict) and known:
        return name not in known
    return any(part.startswith(".") for part in name.split("/"))


def check_destination(destination: Path) -> None:
    """Raise a PackageError if a directory has files and none of them is a package."""
    if destination.is_dir() and not destination.is_symlink():
        own = f".{destination.name}."  # leftovers of killed builds
        entries = [entry for entry in destination.iterdir() if not entry.name.startswith(own)]
        if entries and not any(is_package(entry) for entry in entries):
            raise PackageError(
                f"is a directory with other files, such as {min(entry.name for entry in entries)}, not with packages",
                where=str(destination),
                hint="name a new or empty directory with --out, or the destination of an earlier build",
            )


def check_replaced(destination: Path, names: Iterable[str], kernel: str | None = None) -> None:
    """Raise a PackageError if the place of one of these packages has a foreign file.

    Args:
        kernel: The name that the packages there must have, if they have one; None for any.
    """
    for name in names:
        if kernel and not is_of(destination / name, kernel):
            raise PackageError(
                f"is a package of another kernel than {kernel}",
                where=str(destination / name),
                hint="name another directory with --out, or remove the package",
            )
        if foreign := foreign_file(destination / name):
            fault = "is not a package" if foreign == destination / name else "is not a file of the package around it"
            raise PackageError(
                f"{fault}, and the new package would replace it",
                where=str(foreign),
                hint="move or remove it, or choose another destination with --out",
            )
