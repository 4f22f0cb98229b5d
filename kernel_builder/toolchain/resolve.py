"""Writes a new lock from the index: which versions, and which bytes of their wheels.

- Torch: the newest patch of each release, and of its wheels the newest build for the oldest CPython. The headers are
  the same in the wheels of every CPython.
- CUDA: the newest patch of each release of `cuda-toolkit`, whose metadata pins the versions of the parts.

Only the byte ranges that a build would fetch are downloaded, and each wheel's zip directory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from packaging.metadata import Metadata
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from kernel_builder.config.variant import Release
from kernel_builder.errors import FetchError, ToolchainError
from kernel_builder.progress import Progress
from kernel_builder.toolchain import wheel_trees, wheels
from kernel_builder.toolchain.index import Index
from kernel_builder.toolchain.lock import CudaPin, Lock, TorchPin, Wheel
from kernel_builder.toolchain.tools import Subset

if TYPE_CHECKING:
    from pypi_simple import DistributionPackage

CUDA_SET = "cuda-toolkit"
CUDA_PARTS = ("nvidia-cuda-cccl", "nvidia-cuda-crt", "nvidia-cuda-nvcc", "nvidia-cuda-runtime", "nvidia-nvvm")

# Two ranges closer than this many bytes are fetched as one: a request costs more than the bytes between.
_NEAR = 32_768


def resolve(
    index: Index,
    torch: Sequence[Release],
    cuda: Sequence[Release],
    platforms: Sequence[str],
    progress: Progress,
) -> Lock:
    """Return the lock for these releases. A CUDA release whose compiler the index lacks is reported and left out.

    Raises:
        FetchError: If the index cannot be reached or lacks a Torch release.
        ToolchainError: If a wheel is not laid out as expected.
    """
    cudas = {}
    for release in cuda:
        if (pinned := _pin_cuda(index, release, platforms)) is None:
            progress.say(f"CUDA {release}: left out, the index has no complete compiler of it")
            continue
        progress.say(f"CUDA {release}: {pinned.version}")
        cudas[release] = pinned
    torches = {}
    for release in torch:
        torches[release] = _pin_torch(index, release, platforms)
        progress.say(f"Torch {release}: {torches[release].version}")
    return Lock(cudas, torches)


def _pin_cuda(index: Index, release: Release, platforms: Sequence[str]) -> CudaPin | None:
    sets = _of_release(index.packages(CUDA_SET), release)
    if not sets:
        return None
    chosen = max(sets, key=_version)
    with index.open(chosen) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Metadata.from_email(archive.read(name), validate=False)
    wanted: dict[str, SpecifierSet] = {}
    for requirement in metadata.requires_dist or []:
        if requirement.name in CUDA_PARTS:
            wanted[requirement.name] = wanted.get(requirement.name, SpecifierSet()) & requirement.specifier
    if wanted.keys() != set(CUDA_PARTS):
        return None
    pinned = {}
    for platform in platforms:
        parts = []
        for project, versions in sorted(wanted.items()):
            offered = [
                package for package in _for_platform(index.packages(project), platform) if _version(package) in versions
            ]
            if not offered:
                raise _lacks(f"{project}{versions} for {platform}", index)
            parts.append(
                _pin_wheel(
                    index, max(offered, key=_preference), wheel_trees.cuda_prefix(release), [wheel_trees.keep_cuda]
                )[0]
            )
        pinned[platform] = tuple(parts)
    return CudaPin(release, str(_version(chosen)), pinned)


def _pin_torch(index: Index, release: Release, platforms: Sequence[str]) -> TorchPin:
    newest = max(map(_version, _of_release(index.packages("torch"), release)), default=None)
    pinned = {}
    subsets: tuple[Subset, ...] = ("stable", "full")
    for platform in platforms:
        offered = [p for p in _for_platform(index.packages("torch"), platform) if _version(p) == newest]
        if not offered:
            raise _lacks(f"torch {release} for {platform}", index)
        parts = _pin_wheel(
            index, max(offered, key=_preference), wheel_trees.TORCH_PREFIX, map(wheel_trees.keep_torch, subsets)
        )
        pinned[platform] = dict(zip(subsets, parts, strict=True))
    return TorchPin(release, str(newest), pinned)


def _version(package: DistributionPackage) -> Version:
    try:
        return Version(package.version or "")
    except InvalidVersion:
        return Version("0")


def _of_release(packages: Iterable[DistributionPackage], release: Release) -> list[DistributionPackage]:
    """Return the wheels of a release, without pre-releases and yanked files."""
    return [
        package
        for package in packages
        if package.package_type == "wheel"
        and not package.is_yanked
        and _version(package).release[:2] == release
        and not _version(package).is_prerelease
    ]


def _for_platform(packages: Iterable[DistributionPackage], platform: str) -> list[DistributionPackage]:
    machine = platform.partition("-")[0]
    return [
        package
        for package in packages
        if package.package_type == "wheel"
        and not package.is_yanked
        and any(
            tag.platform.startswith("manylinux") and tag.platform.endswith(f"_{machine}")
            for tag in parse_wheel_filename(package.filename)[3]
        )
    ]


def _preference(package: DistributionPackage) -> tuple[Version, bool, int, tuple[int, str] | tuple[()]]:
    """Sort key of wheels: version, then the oldest CPython without free threading, then build number."""
    _, version, build, tags = parse_wheel_filename(package.filename)
    tag = min(tags, key=str)
    digits = tag.interpreter.removeprefix("cp")
    minor = int(digits[1:]) if tag.interpreter.startswith("cp") and digits[1:].isdigit() else 0
    return version, not tag.abi.endswith("t"), -minor, build


def _pin_wheel(
    index: Index, package: DistributionPackage, prefix: str, keeps: Iterable[Callable[[str], bool]]
) -> list[Wheel]:
    """Pin parts of one wheel: for each rule of `keeps`, the files under `prefix` that it accepts, and `RECORD`."""
    name = package.filename
    with index.open(package) as archive:
        size = archive.size()
        infos = sorted(archive.infolist(), key=lambda info: info.header_offset)
        ends = [*(info.header_offset for info in infos[1:]), archive.start_dir]
        record_name = next((i.filename for i in infos if i.filename.endswith(".dist-info/RECORD")), None)
        if record_name is None or "sha256" not in package.digests:
            raise ToolchainError("has no RECORD, or the index states no SHA-256 of it", where=name)
        record = archive.read(record_name)
    hashes = wheels.parse_record(record.decode("utf-8"))
    pinned = []
    for keep in keeps:
        ranges: list[tuple[int, int]] = []
        unpacked = 0
        for info, end in zip(infos, ends, strict=True):
            inside = info.filename.removeprefix(prefix)
            kept = info.filename.startswith(prefix) and not info.is_dir() and keep(inside)
            if not kept and info.filename != record_name:
                continue
            if info.flag_bits & 0x8 or (kept and info.filename not in hashes):
                raise ToolchainError(
                    f"{info.filename}: has no sizes before its content, or no hash in RECORD", where=name
                )
            unpacked += info.file_size if kept else 0
            start = info.header_offset
            if ranges and start - ranges[-1][1] < _NEAR:
                start = ranges.pop()[0]
            ranges.append((start, end))
        if not unpacked:
            raise ToolchainError(f"has none of the files expected under {prefix}", where=name)
        pinned.append(
            Wheel(
                project=canonicalize_name(package.project or ""),
                version=str(_version(package)),
                file=name,
                size=size,
                sha256=package.digests["sha256"],
                record=hashlib.sha256(record).hexdigest(),
                ranges=tuple(ranges),
                fetched=_hash_ranges(index, package, ranges),
                unpacked=unpacked,
            )
        )
    return pinned


def _hash_ranges(index: Index, package: DistributionPackage, ranges: Iterable[tuple[int, int]]) -> str:
    digest = hashlib.sha256()
    for start, stop in ranges:
        digest.update(index.read(package, start, stop))
    return digest.hexdigest()


def _lacks(wanted: str, index: Index) -> FetchError:
    return FetchError(
        "the index does not have it", where=f"{wanted} at {index.url}", hint="use another index (`--index-url`)"
    )
