"""Reads `matrix.toml`: which Torch and CUDA releases, capabilities and platforms go together."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from kernel_builder import toml_file
from kernel_builder.config.variant import Release


@dataclass(frozen=True)
class ClangReleases:
    """The releases of the wheels that clang and its CUDA are taken from.

    Attributes:
        ziglang: The wheel that has the program.
        headers: The wheel that has its headers.
        cuda: The CUDA release that it compiles with.
        fatbinary: The CUDA release whose `fatbinary` it runs.
    """

    ziglang: Release
    headers: Release
    cuda: Release
    fatbinary: Release


@dataclass(frozen=True)
class Matrix:
    """The support matrix.

    Attributes:
        hub_releases: The number of newest Torch releases that a full-ABI kernel offers.
        platforms: The platforms that the Hub asks for.
        oldest_stable: The oldest Torch release whose stable ABI can be targeted.
        torch: Torch release -> the CUDA releases that it is published for, ascending.
        capabilities: CUDA release -> the capabilities that its compiler knows, ascending.
        cxx: Torch release -> the C++ standard that its headers need.
        tegra: Capabilities of GPUs that exist only in machines of `tegra_platforms`.
        clang: What clang is made of.
    """

    hub_releases: int
    platforms: tuple[str, ...]
    oldest_stable: Release
    torch: dict[Release, tuple[Release, ...]]
    capabilities: dict[Release, tuple[str, ...]]
    cxx: dict[Release, int]
    tegra: frozenset[str]
    tegra_platforms: frozenset[str]
    clang: ClangReleases


@lru_cache(maxsize=1)
def load() -> Matrix:
    """Return the matrix that comes with the builder."""
    data = toml_file.read(Path(__file__).with_name("matrix.toml"))
    return Matrix(
        hub_releases=data["hub"]["torch-releases"],
        platforms=tuple(data["hub"]["platforms"]),
        oldest_stable=Release.parse(data["stable-abi"]["oldest"]),
        torch=dict(
            sorted(
                (Release.parse(release), tuple(sorted(map(Release.parse, entry["cuda"]))))
                for release, entry in data["torch"].items()
            )
        ),
        capabilities=dict(
            sorted((Release.parse(release), tuple(entry["capabilities"])) for release, entry in data["cuda"].items())
        ),
        cxx={Release.parse(release): entry.get("cxx", 17) for release, entry in data["torch"].items()},
        tegra=frozenset(data["tegra"]["capabilities"]),
        tegra_platforms=frozenset(data["tegra"]["platforms"]),
        clang=ClangReleases(**{name: Release.parse(release) for name, release in data["clang"].items()}),
    )


def torch_releases() -> tuple[Release, ...]:
    """Return every Torch release of the matrix, ascending."""
    return tuple(load().torch)


def cuda_releases() -> tuple[Release, ...]:
    """Return every CUDA release of the matrix, ascending."""
    return tuple(load().capabilities)


def cxx_standard(torch: Release) -> int:
    """Return the C++ standard for a Torch release's headers. Releases after the matrix take that of its newest."""
    standards = load().cxx
    return standards.get(torch, standards[max(standards)] if torch > max(standards) else 17)


def known_capabilities() -> frozenset[str]:
    """Return every capability that a compiler of the matrix knows, without suffixes and `+PTX`."""
    return frozenset(capability for known in load().capabilities.values() for capability in known)
