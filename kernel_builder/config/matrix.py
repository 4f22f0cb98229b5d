"""Reads `matrix.toml`: the releases of Torch and of TVM FFI, and the platforms that the Hub asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from kernel_builder import toml_file
from kernel_format.release import Release


@dataclass(frozen=True)
class Matrix:
    """The support matrix.

    Attributes:
        hub_releases: The number of newest Torch releases that a full-ABI kernel offers.
        oldest_stable: The oldest Torch release whose stable ABI can be targeted.
        torch: The Torch releases, ascending.
        torch_headers: Part of Torch's headers -> the beginnings of their names.
        cxx: Torch release -> the C++ standard that its headers need.
        tvm_ffi: The release of TVM FFI that projects without Torch are compiled for.
        component: Components of toolchains, as in the tables of back ends.
        kernel_language: `triton` or `cute-dsl` -> the releases of its compiler, and their files.
    """

    hub_releases: int
    platforms: tuple[str, ...]
    oldest_stable: Release
    torch: tuple[Release, ...]
    torch_headers: Mapping[Any, list[str]]
    cxx: dict[Release, int]
    tvm_ffi: Release
    component: Mapping[str, Any]
    kernel_language: Mapping[str, Any]


@lru_cache(maxsize=1)
def load() -> Matrix:
    """Return the matrix that comes with the builder."""
    data = toml_file.read(Path(__file__).with_name("matrix.toml"))
    return Matrix(
        hub_releases=data["hub"]["torch-releases"],
        platforms=tuple(data["hub"]["platforms"]),
        oldest_stable=Release.parse(data["stable-abi"]["oldest"]),
        torch=tuple(sorted(map(Release.parse, data["torch"]))),
        torch_headers=data["torch-headers"],
        cxx={Release.parse(release): entry.get("cxx", 17) for release, entry in data["torch"].items()},
        tvm_ffi=Release.parse(data["tvm-ffi"]["release"]),
        component=data["component"],
        kernel_language=data["kernel-language"],
    )
