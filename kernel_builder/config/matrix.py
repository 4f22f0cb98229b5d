"""The data of `matrix.toml`: which Torch and CUDA releases, capabilities and platforms go together."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources

from kernel_builder.config.variant import Release

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Matrix:
    """The data of `matrix.toml`.

    Attributes:
        hub_releases: How many of the newest Torch releases a full-ABI kernel offers.
        platforms: The platforms that the Hub asks for.
        torch: Torch release -> the CUDA releases it is published for, ascending.
        capabilities: CUDA release -> the capabilities that its compiler knows, ascending.
        cxx: Torch release -> the C++ standard that its headers need.
        tegra: Capabilities that only machines of `tegra_platforms` have.
    """

    hub_releases: int
    platforms: tuple[str, ...]
    torch: dict[Release, tuple[Release, ...]]
    capabilities: dict[Release, tuple[str, ...]]
    cxx: dict[Release, int]
    tegra: frozenset[str]
    tegra_platforms: frozenset[str]


@lru_cache(maxsize=1)
def load() -> Matrix:
    """The matrix that comes with this builder."""
    text = (resources.files(__package__) / "matrix.toml").read_text()
    data = tomllib.loads(text)
    return Matrix(
        hub_releases=data["hub"]["torch-releases"],
        platforms=tuple(data["hub"]["platforms"]),
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
    )


def torch_releases() -> tuple[Release, ...]:
    """Every Torch release of the matrix, ascending."""
    return tuple(load().torch)


def cuda_releases() -> tuple[Release, ...]:
    """Every CUDA release of the matrix, ascending."""
    return tuple(load().capabilities)


def cxx_standard(torch: Release) -> int:
    """The C++ standard to compile a Torch release's headers with; newer releases need what the newest does."""
    standards = load().cxx
    return standards.get(torch, standards[max(standards)] if torch > max(standards) else 17)


def known_capabilities() -> frozenset[str]:
    """Every capability that some compiler of the matrix knows, without suffixes and `+PTX`."""
    return frozenset(capability for known in load().capabilities.values() for capability in known)
