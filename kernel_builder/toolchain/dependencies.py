"""Header libraries that `depends` can name: those of `dependencies.toml`, and directories that the user gives."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kernel_builder import toml_file
from kernel_builder.backends.tools import HeaderLibrary
from kernel_format.errors import ToolchainError
from kernel_format.files import digest_files

VARIABLE = "KERNEL_BUILDER_DEPENDENCIES"

# Name -> the table of a header library; `version` is that of the public builder.
KNOWN: Mapping[str, Mapping[str, Any]] = toml_file.read(Path(__file__).with_suffix(".toml"))["component"]
_INCLUDE = ("include", "tools/util/include")


def include_directories(root: Path) -> tuple[Path, ...]:
    """Return the include directories of a library."""
    return tuple(path for path in (root / part for part in _INCLUDE) if path.is_dir())


def given() -> dict[str, Path]:
    """Return the directories that KERNEL_BUILDER_DEPENDENCIES names: `NAME=DIR`, separated by colons."""
    directories = {}
    for text in filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)):
        name, _, directory = text.partition("=")
        if not directory or name not in KNOWN:
            raise ToolchainError(
                f"{text!r} is not NAME=DIR with one of the names {', '.join(KNOWN)}",
                where=VARIABLE,
                hint="write for example cutlass_3_9=/opt/cutlass, a directory with include/cutlass/cutlass.h",
            )
        directories[name] = Path(directory)
    return directories


def check_directory(name: str, directory: Path) -> None:
    """Raise a ToolchainError unless a directory has the headers of a library, in its release."""
    version = KNOWN[name]["version"]
    expected = version.rpartition(".")[0]
    where = f"{name}={directory}"
    if not (directory / "include/cutlass/cutlass.h").is_file():
        raise ToolchainError(
            "is not a directory of CUTLASS: it has no include/cutlass/cutlass.h",
            where=where,
            hint=f"name a checkout of CUTLASS {version}",
        )
    if re.search(r"[\s,]", str(directory.absolute())):
        raise ToolchainError(
            "nvcc does not accept white space and commas in the path", where=where, hint="give a link to the directory"
        )
    # Releases before 3.0 do not have this file.
    header = directory / "include/cutlass/version.h"
    text = header.read_text(encoding="utf-8", errors="replace") if header.is_file() else ""
    stated = ".".join(re.findall(r"#define CUTLASS_(?:MAJOR|MINOR|PATCH)\s+(\d+)", text))
    if stated and not stated.startswith(f"{expected}."):
        raise ToolchainError(
            f"is CUTLASS {stated}, expected {expected}", where=where, hint=f"check out the tag v{version}"
        )


def in_directory(name: str, directory: Path) -> HeaderLibrary:
    """Return a library in a directory that the user names, identified by the content of its headers."""
    check_directory(name, directory)
    root = directory.absolute()
    directories = include_directories(root)
    return HeaderLibrary(name, root, directories, digest_files(root, directories))
