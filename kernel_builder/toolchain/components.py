"""Components of toolchains: files of the package index that the matrix or the table of a back end names.

A table has `[component."hip-7.1"]` with a title, a version and files, which are as those of `dependencies.toml`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kernel_builder import backends
from kernel_builder.config import matrix
from kernel_builder.toolchain.dependencies import DependencyFile


@dataclass(frozen=True)
class Component:
    """Headers and libraries of a back end or TVM FFI, the same on all platforms. Later files replace earlier ones.

    Attributes:
        name: What the lock and the store call it, such as `hip-7.1`.
        title: What messages call it.
    """

    name: str
    title: str
    version: str
    files: tuple[DependencyFile, ...]


def known() -> Mapping[str, Component]:
    """Return the components of all frameworks and back ends by name."""
    tables = [matrix.load().component, *(backend.data.get("component", {}) for backend in backends.every())]
    return {
        name: Component(
            name,
            entry["title"],
            entry["version"],
            tuple(DependencyFile(file["file"], file["prefix"], tuple(file["take"])) for file in entry["files"]),
        )
        for table in tables
        for name, entry in table.items()
    }
