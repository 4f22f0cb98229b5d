"""New releases of Torch, as an index and their own wheels describe them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from packaging.requirements import Requirement
from pypi_simple import DistributionPackage

from kernel_builder import elf
from kernel_builder.config.variant import Release
from kernel_builder.toolchain import resolve
from kernel_builder.toolchain.components import TORCH_PREFIX
from kernel_builder.toolchain.index import Index
from kernel_format.errors import ToolchainError
from kernel_format.files import temporary_directory

# The package whose requirements pin the parts of a CUDA release.
_CUDA_SET = "cuda-toolkit"
_LIBRARIES = "torch/lib/"
# This header refuses older C++ standards than the others need.
_ALL = f"{TORCH_PREFIX}torch/csrc/api/include/torch/all.h"
_STANDARD = re.compile(r"__cplusplus < 20(\d\d)\d\dL")
_OF_CUDA_12 = re.compile(r"nvidia-cuda-runtime-cu(\d+)")


@dataclass(frozen=True)
class TorchRelease:
    """A release of Torch.

    Attributes:
        cuda: The CUDA releases that it is published for, ascending.
        pypi: The CUDA release of its build on the package index.
        cxx: The C++ standard that its headers need.
    """

    release: Release
    cuda: tuple[Release, ...]
    pypi: Release
    cxx: int


def released_after(newest: Release, index: Index, builds: Index, platform: str) -> Iterator[TorchRelease]:
    """Yield the final releases of Torch that came after one, ascending.

    Args:
        index: The package index.
        builds: The index with Torch's builds for every CUDA release, such as `2.15.0+cu130`.
        platform: The platform whose wheels are read.
    """
    versions = {
        resolve.version_of(package)
        for package in resolve.for_platform(index.packages("torch"), platform)
        if not resolve.version_of(package).is_prerelease
    }
    releases = sorted({Release(*version.release[:2]) for version in versions})
    for release in (release for release in releases if release > newest):
        wheel = newest_wheel(index, release, platform)
        of_builds = resolve.for_platform(resolve.of_release(builds.packages("torch"), release), platform)
        cuda = {_cuda(resolve.version_of(package).local or "") for package in of_builds} - {None}
        yield TorchRelease(
            release,
            tuple(sorted(cuda_release for cuda_release in cuda if cuda_release)),
            _own_cuda(wheel, resolve.requirements_of(index, wheel)),
            _standard(index, wheel),
        )


def newest_wheel(index: Index, release: Release, platform: str) -> DistributionPackage:
    """Return the wheel of a release that the lock resolve."""
    return max(
        resolve.for_platform(resolve.of_release(index.packages("torch"), release), platform),
        key=resolve.preference,
    )


def needed_libraries(index: Index, release: Release, platform: str) -> frozenset[str]:
    """Return the outside libraries that libtorch_cuda.so and its libraries in the wheel load, such as `cublas`.

    Reads some 500 MB of the wheel.
    """
    needs: dict[str, tuple[str, ...]] = {}
    with index.open(newest_wheel(index, release, platform)) as archive, temporary_directory() as directory:
        own = {PurePosixPath(name).name for name in archive.namelist() if name.startswith(_LIBRARIES)}
        left = ["libtorch_cuda.so"]
        while left:
            library = Path(directory, name := left.pop())
            with archive.open(_LIBRARIES + name) as packed, library.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked, 1 << 20)
            needs[name] = elf.read(library).needed
            library.unlink()
            left += [needed for needed in needs[name] if needed in own and needed not in needs and needed not in left]
    names = (re.fullmatch(r"lib(\w+)\.so[.\d]*", name) for of in needs.values() for name in of if name not in own)
    return frozenset(match[1] for match in names if match)


def _cuda(local: str) -> Release | None:
    """Return the CUDA release of a local version such as `cu130`."""
    match = re.fullmatch(r"cu(\d\d)(\d+)", local)
    return Release(int(match[1]), int(match[2])) if match else None


def _own_cuda(wheel: DistributionPackage, requirements: list[Requirement]) -> Release:
    for requirement in requirements:
        if requirement.name == _CUDA_SET or _OF_CUDA_12.fullmatch(requirement.name):
            for specifier in requirement.specifier:
                return Release.parse(".".join(specifier.version.split(".")[:2]))
    raise ToolchainError(
        f"requires neither {_CUDA_SET} nor the CUDA runtime",
        where=wheel.filename,
        hint="add the release to matrix.toml manually",
    )


def _standard(index: Index, wheel: DistributionPackage) -> int:
    with index.open(wheel) as archive:
        match = _STANDARD.search(archive.read(_ALL).decode("utf-8", "replace"))
    if not match:
        raise ToolchainError(
            f"{_ALL} does not state its C++ standard",
            where=wheel.filename,
            hint="add the release to matrix.toml manually",
        )
    return int(match[1])
