"""The toolchain lock: which files of an index, which byte ranges of them, and the hashes that pin their content.

The lock holds file names and no addresses, so that any index that has the files will do. Of each wheel only the byte
ranges with the needed files are fetched. One of these files is the wheel's `RECORD`, which lists the SHA-256 of every
other file: pinning the SHA-256 of `RECORD` pins all of them. A source distribution, which is one compressed stream, is
fetched whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from kernel_builder.config.variant import Release
from kernel_builder.toolchain.tools import Subset
from kernel_format.errors import ToolchainError

SCHEMA = 4


class PinnedFile(NamedTuple):
    """Part of one wheel, or of one source distribution.

    Attributes:
        project: The name of the project in the index.
        file: The file name in the index.
        size: Bytes of the whole file.
        sha256: SHA-256 of the whole file, as the index states it.
        record: SHA-256 of the wheel's `RECORD`; None for a source distribution.
        ranges: Byte ranges `(start, stop)` to fetch, ascending and disjoint. Each holds whole zip members.
        fetched: SHA-256 of the bytes of all ranges in order. Nix needs it before the ranges are unpacked.
        prefix: A directory in the file, with a slash at its end. What is outside of it is left out.
        take: What is kept of `prefix`: names that begin with one of these.
        unpacked: Bytes on disk of what is kept.
    """

    project: str
    version: str
    file: str
    size: int
    sha256: str
    record: str | None
    ranges: tuple[tuple[int, int], ...]
    fetched: str
    prefix: str
    take: tuple[str, ...]
    unpacked: int

    @property
    def identity(self) -> str:
        """The hash that pins everything that is kept."""
        return self.record or self.sha256

    @property
    def download(self) -> int:
        """Bytes to fetch."""
        return sum(stop - start for start, stop in self.ranges)


class CudaPin(NamedTuple):
    """One CUDA release.

    Attributes:
        version: The version of `cuda-toolkit`, whose metadata pins the versions of the parts.
        platforms: Platform -> the compiler with its headers.
        libraries: Platform -> the headers of CUDA's libraries, such as cuBLAS.
    """

    release: Release
    version: str
    platforms: Mapping[str, tuple[PinnedFile, ...]]
    libraries: Mapping[str, tuple[PinnedFile, ...]]


class ClangPin(NamedTuple):
    """clang, and the CUDA release that it compiles with.

    Attributes:
        version: The version of its headers, for example `22.1.7`.
        platforms: Platform -> the program with its headers.
        cuda: Headers, `ptxas`, `fatbinary` and `libdevice`; no nvcc.
    """

    version: str
    platforms: Mapping[str, tuple[PinnedFile, ...]]
    cuda: CudaPin


class TorchPin(NamedTuple):
    """One Torch release. Each platform has one wheel, of which each subset of the headers takes a part."""

    release: Release
    version: str
    platforms: Mapping[str, Mapping[Subset, PinnedFile]]


class DependencyPin(NamedTuple):
    """One header library, which is the same on all platforms. `license` is its SPDX name."""

    name: str
    version: str
    license: str
    files: tuple[PinnedFile, ...]


class ComponentPin(NamedTuple):
    """What the compiler of a back end needs besides itself; see `components.Component`."""

    name: str
    title: str
    version: str
    files: tuple[PinnedFile, ...]


class Lock(NamedTuple):
    """Everything that is pinned, releases ascending. A CUDA release in `cuda` has an nvcc."""

    cuda: Mapping[Release, CudaPin]
    torch: Mapping[Release, TorchPin]
    dependencies: Mapping[str, DependencyPin]
    clang: ClangPin | None = None
    components: Mapping[str, ComponentPin] = {}


def load_file(entry: Mapping[str, Any]) -> PinnedFile:
    """Return the pinned file of an entry of the lock."""
    ranges = [text.split("-") for text in entry["ranges"]]
    parsed = tuple((int(start), int(stop)) for start, stop in ranges)
    return PinnedFile(**{**entry, "ranges": parsed, "take": tuple(entry["take"])})


def _load_platforms(entry: Mapping[str, Any]) -> Mapping[str, tuple[PinnedFile, ...]]:
    return {platform: tuple(map(load_file, files)) for platform, files in entry.items()}


def _dump_file(file: PinnedFile) -> dict[str, Any]:
    return {**file._asdict(), "ranges": [f"{start}-{stop}" for start, stop in file.ranges]}


def _dump_platforms(platforms: Mapping[str, tuple[PinnedFile, ...]]) -> dict[str, Any]:
    return {name: [_dump_file(file) for file in files] for name, files in platforms.items()}


def _load_cuda(release: str, entry: Mapping[str, Any]) -> CudaPin:
    platforms, libraries = _load_platforms(entry["platforms"]), _load_platforms(entry["libraries"])
    return CudaPin(Release.parse(release), entry["version"], platforms, libraries)


def _dump_cuda(cuda: CudaPin) -> dict[str, Any]:
    return {
        "version": cuda.version,
        "platforms": _dump_platforms(cuda.platforms),
        "libraries": _dump_platforms(cuda.libraries),
    }


def _load_clang(entry: Mapping[str, Any]) -> ClangPin:
    cuda = _load_cuda(entry["cuda"]["release"], entry["cuda"])
    return ClangPin(entry["version"], _load_platforms(entry["platforms"]), cuda)


def _dump_clang(clang: ClangPin) -> dict[str, Any]:
    return {
        "version": clang.version,
        "platforms": _dump_platforms(clang.platforms),
        "cuda": {"release": str(clang.cuda.release), **_dump_cuda(clang.cuda)},
    }


def _dump_components(components: Mapping[str, ComponentPin]) -> dict[str, Any]:
    return {
        name: {"title": pin.title, "version": pin.version, "files": [_dump_file(file) for file in pin.files]}
        for name, pin in components.items()
    }


def loads(text: str, where: str) -> Lock:
    """Parse the text of a lock.

    Args:
        where: The file name for errors.

    Raises:
        ToolchainError: If the text is not a lock of this schema.
    """
    try:
        data = json.loads(text)
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema {data['schema']}, expected {SCHEMA}")
        cuda = {Release.parse(name): _load_cuda(name, entry) for name, entry in data["cuda"].items()}
        torch = {
            Release.parse(name): TorchPin(
                Release.parse(name),
                entry["version"],
                {
                    platform: {"stable": load_file(subsets["stable"]), "full": load_file(subsets["full"])}
                    for platform, subsets in entry["platforms"].items()
                },
            )
            for name, entry in data["torch"].items()
        }
        dependencies = {
            name: DependencyPin(name, entry["version"], entry["license"], tuple(map(load_file, entry["files"])))
            for name, entry in data["dependencies"].items()
        }
        clang = _load_clang(data["clang"]) if data.get("clang") else None
        components = {
            name: ComponentPin(name, entry["title"], entry["version"], tuple(map(load_file, entry["files"])))
            for name, entry in data.get("components", {}).items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ToolchainError(
            f"is not a toolchain lock: {error!r}",
            where=where,
            hint="`kernel-builder toolchain lock --output FILE` writes one",
        ) from error
    return Lock(dict(sorted(cuda.items())), dict(sorted(torch.items())), dependencies, clang, components)


def dumps(lock: Lock) -> str:
    """Return the text of a lock: JSON with one value a line, so that changes are easy to review."""
    data = {
        "schema": SCHEMA,
        "cuda": {str(release): _dump_cuda(cuda) for release, cuda in sorted(lock.cuda.items())},
        "torch": {
            str(release): {
                "version": torch.version,
                "platforms": {
                    name: {subset: _dump_file(file) for subset, file in subsets.items()}
                    for name, subsets in torch.platforms.items()
                },
            }
            for release, torch in sorted(lock.torch.items())
        },
        "dependencies": {
            name: {
                "version": pin.version,
                "license": pin.license,
                "files": [_dump_file(file) for file in pin.files],
            }
            for name, pin in lock.dependencies.items()
        },
        **({"clang": _dump_clang(lock.clang)} if lock.clang else {}),
        **({"components": _dump_components(lock.components)} if lock.components else {}),
    }
    return json.dumps(data, indent=2) + "\n"


def read(path: Path) -> Lock:
    """Read a lock file.

    Raises:
        ToolchainError: If the file is missing or is not a lock.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ToolchainError(
            f"cannot be read: {error}", where=str(path), hint="`kernel-builder toolchain lock --output FILE` writes one"
        ) from error
    return loads(text, str(path))


@lru_cache(maxsize=1)
def shipped() -> Lock:
    """Return the lock that comes with the builder."""
    return loads(Path(__file__).with_name("lock.json").read_text(encoding="utf-8"), "lock.json")
