"""Components of toolchains: the parts of the package index's files that compilers and headers consist of.

`matrix.toml` and the tables of back ends have a table `[component.NAME]` for each, `dependencies.toml` has the header
libraries, and each Torch release has two components with its headers. `toolchain update` pins them all in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kernel_builder import backends
from kernel_builder.backends.tools import Subset
from kernel_builder.config import matrix
from kernel_builder.toolchain import dependencies
from kernel_format.release import Release
from kernel_format.variant import TvmFfiAbi

TORCH_PREFIX = "torch/include/"


@dataclass(frozen=True, kw_only=True)
class ComponentFile:
    """Part of a wheel or of a source distribution: the names that begin with one of `take`, below `prefix`.

    Exactly one of `file`, `release` and `required_by` selects the file.

    Attributes:
        file: The name of the file, which all platforms share.
        release: The newest version of this release of the project, for each platform.
        required_by: The version that another package requires: `cuda-toolkit 13.0` is the newest version of that
            release.
    """

    project: str
    prefix: str
    take: tuple[str, ...]
    file: str | None = None
    release: Release | None = None
    required_by: str | None = None


@dataclass(frozen=True, kw_only=True)
class Component:
    """Files of the index that make one directory of the store. Later files replace earlier ones.

    Attributes:
        name: The name in the lock and the store, such as `cuda-13.0`.
        version: None for the version of the package that requires the files, or else of the last file.
        files: Empty if no index has it.
    """

    name: str
    title: str
    files: tuple[ComponentFile, ...]
    version: str | None = None


def in_table(table: Mapping[str, Any]) -> Iterator[Component]:
    """Yield the components of the matrix or of a back end's table."""
    for name, entry in table.get("component", {}).items():
        files = tuple(_file(file, entry.get("required-by")) for file in entry.get("files", ()))
        yield Component(name=name, title=entry["title"], version=entry.get("version"), files=files)


def _file(entry: Mapping[str, Any], required_by: str | None) -> ComponentFile:
    selected = {"file", "release", "required-by"} & entry.keys()
    return ComponentFile(
        project=entry["project"] if "project" in entry else entry["file"].partition("-")[0].replace("_", "-"),
        prefix=entry["prefix"],
        take=tuple(entry["take"]),
        file=entry.get("file"),
        release=Release.parse(entry["release"]) if "release" in entry else None,
        required_by=entry.get("required-by", None if selected else required_by),
    )


def of_torch(releases: Iterable[Release]) -> Iterator[Component]:
    """Yield the headers of Torch releases."""
    for release in releases:
        for subset, take in matrix.load().torch_headers.items():
            yield Component(
                name=torch_headers(release, subset),
                title=f"Torch {release} headers ({subset})",
                files=(ComponentFile(project="torch", prefix=TORCH_PREFIX, take=tuple(take), release=release),),
            )


def of_languages(tables: Mapping[str, Any]) -> Iterator[Component]:
    """Yield the releases of compilers of kernels, with the packages that they import, for each release of Python."""
    for language, table in tables.items():
        for release in table["releases"]:
            for python in table["pythons"]:
                files = tuple(
                    _file({**file, "prefix": "", "file": file["file"].format(release=release, python=python)}, None)
                    for file in table["files"]
                )
                title = f"{table['title']} {release} for Python 3.{python[3:]}"
                yield Component(name=f"{language}-{release}-{python}", title=title, version=release, files=files)


def torch_headers(release: Release, subset: Subset) -> str:
    """Return the name of the component with the headers of a Torch release."""
    return f"torch-{release}-{subset}"


def tvm_ffi_headers(framework: TvmFfiAbi) -> str:
    """Return the name of the component with the headers of a release of TVM FFI."""
    return f"tvm-ffi-{framework.release}"


def known() -> dict[str, Component]:
    """Return all components by name."""
    tables = [{"component": matrix.load().component}, *(backend.data for backend in backends.every())]
    tables.append({"component": dependencies.KNOWN})
    every = [component for table in tables for component in in_table(table)]
    every += [*of_torch(matrix.load().torch), *of_languages(matrix.load().kernel_language)]
    return {component.name: component for component in every}
