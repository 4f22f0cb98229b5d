"""The toolchain lock: which wheels, which byte ranges of them, and the hashes that pin their content.

The lock holds file names and no addresses, so that any index that has the files will do. Of each wheel only the byte
ranges with the needed files are fetched. One of these files is the wheel's `RECORD`, which lists the SHA-256 of every
other file: pinning the SHA-256 of `RECORD` pins all of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from kernel_builder.config.variant import Release
from kernel_builder.errors import ToolchainError
from kernel_builder.toolchain.tools import Subset

SCHEMA = 2


@dataclass(frozen=True)
class Wheel:
    """Part of one wheel.

    Attributes:
        project: The name of the project in the index.
        file: The file name of the wheel in the index.
        size: Bytes of the whole wheel.
        sha256: SHA-256 of the whole wheel, as the index states it.
        record: SHA-256 of the wheel's `RECORD`.
        ranges: Byte ranges `(start, stop)` to fetch, ascending and disjoint. Each holds whole zip members.
        fetched: SHA-256 of the bytes of all ranges in order. Nix needs it before the ranges are unpacked.
        unpacked: Bytes on disk of the files that are kept.
    """

    project: str
    version: str
    file: str
    size: int
    sha256: str
    record: str
    ranges: tuple[tuple[int, int], ...]
    fetched: str
    unpacked: int

    @property
    def download(self) -> int:
        """Bytes to fetch."""
        return sum(stop - start for start, stop in self.ranges)


@dataclass(frozen=True)
class CudaPin:
    """One CUDA release. `version` is the version of `cuda-toolkit`, whose metadata pins the versions of the parts."""

    release: Release
    version: str
    platforms: Mapping[str, tuple[Wheel, ...]]


@dataclass(frozen=True)
class TorchPin:
    """One Torch release. Each platform has one wheel, of which each subset of the headers takes a part."""

    release: Release
    version: str
    platforms: Mapping[str, Mapping[Subset, Wheel]]


@dataclass(frozen=True)
class Lock:
    """Everything that is pinned, releases ascending."""

    cuda: Mapping[Release, CudaPin]
    torch: Mapping[Release, TorchPin]


def load_wheel(entry: Mapping[str, Any]) -> Wheel:
    ranges = [text.split("-") for text in entry["ranges"]]
    return Wheel(**{**entry, "ranges": tuple((int(start), int(stop)) for start, stop in ranges)})


def _dump_wheel(wheel: Wheel) -> dict[str, Any]:
    return {**asdict(wheel), "ranges": [f"{start}-{stop}" for start, stop in wheel.ranges]}


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
        cuda = {
            Release.parse(name): CudaPin(
                Release.parse(name),
                entry["version"],
                {platform: tuple(map(load_wheel, wheels)) for platform, wheels in entry["platforms"].items()},
            )
            for name, entry in data["cuda"].items()
        }
        torch = {
            Release.parse(name): TorchPin(
                Release.parse(name),
                entry["version"],
                {
                    platform: {"stable": load_wheel(subsets["stable"]), "full": load_wheel(subsets["full"])}
                    for platform, subsets in entry["platforms"].items()
                },
            )
            for name, entry in data["torch"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ToolchainError(
            f"is not a toolchain lock: {error!r}",
            where=where,
            hint="`kernel-builder toolchain lock --output FILE` writes one",
        ) from error
    return Lock(dict(sorted(cuda.items())), dict(sorted(torch.items())))


def dumps(lock: Lock) -> str:
    """Return the text of a lock: JSON with one value a line, so that changes are easy to review."""
    data = {
        "schema": SCHEMA,
        "cuda": {
            str(release): {
                "version": cuda.version,
                "platforms": {
                    name: [_dump_wheel(wheel) for wheel in wheels] for name, wheels in cuda.platforms.items()
                },
            }
            for release, cuda in sorted(lock.cuda.items())
        },
        "torch": {
            str(release): {
                "version": torch.version,
                "platforms": {
                    name: {subset: _dump_wheel(wheel) for subset, wheel in subsets.items()}
                    for name, subsets in torch.platforms.items()
                },
            }
            for release, torch in sorted(lock.torch.items())
        },
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
    return loads((resources.files(__package__) / "lock.json").read_text(encoding="utf-8"), "lock.json")
