"""Pins parts of files of an index: the file, the byte ranges to fetch, and the hashes of their content.

Only the byte ranges that a build would fetch are downloaded, and each wheel's zip directory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version
from pypi_simple import DistributionPackage

from kernel_builder.config.variant import Release
from kernel_builder.toolchain import sdists, wheels
from kernel_builder.toolchain.index import Index
from kernel_builder.toolchain.lock import PinnedFile
from kernel_format.errors import FetchError, ToolchainError

# Two ranges closer than this many bytes are fetched as one: a request costs more than the bytes between.
_NEAR = 32_768


def pin_part(
    index: Index, project: str, versions: SpecifierSet, platform: str, prefix: str, take: tuple[str, ...]
) -> PinnedFile:
    offered = [
        package for package in for_platform(index.packages(project), platform) if version_of(package) in versions
    ]
    if not offered:
        raise lacks(f"{project}{versions} for {platform}", index)
    return pin_wheel(index, max(offered, key=preference), prefix, take)


def requirements_of(index: Index, wheel: DistributionPackage) -> list[Requirement]:
    with index.open(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Metadata.from_email(archive.read(name), validate=False).requires_dist or []


def named(index: Index, project: str, file: str) -> DistributionPackage:
    """Return a file of the index by its name."""
    package = next((candidate for candidate in index.packages(project) if candidate.filename == file), None)
    if package is None:
        raise lacks(file, index)
    return package


def newest(index: Index, project: str, release: Release) -> Version:
    """Return the newest version of a release of a project."""
    offered = of_release(index.packages(project), release)
    if not offered:
        raise lacks(f"{project} {release}", index)
    return max(map(version_of, offered))


def pin_sdist(index: Index, package: DistributionPackage, prefix: str, take: tuple[str, ...]) -> PinnedFile:
    """Pin a source distribution, of which the whole is fetched."""
    data = index.read(package)
    sha256 = hashlib.sha256(data).hexdigest()
    files = sdists.checked(
        memoryview(data), package.digests.get("sha256", ""), prefix, lambda name: name.startswith(take)
    )
    return PinnedFile(
        project=canonicalize_name(package.project or ""),
        version=str(version_of(package)),
        file=package.filename,
        size=len(data),
        sha256=sha256,
        record=None,
        ranges=((0, len(data)),),
        fetched=sha256,
        prefix=prefix,
        take=take,
        unpacked=sum(len(content) for _, content in files),
    )


def version_of(package: DistributionPackage) -> Version:
    try:
        return Version(package.version or "")
    except InvalidVersion:
        return Version("0")


def of_release(packages: Iterable[DistributionPackage], release: Release) -> list[DistributionPackage]:
    """Return the wheels of a release, without pre-releases and yanked files."""
    return [
        package
        for package in packages
        if package.package_type == "wheel"
        and not package.is_yanked
        and version_of(package).release[:2] == release
        and not version_of(package).is_prerelease
    ]


def for_platform(packages: Iterable[DistributionPackage], platform: str) -> list[DistributionPackage]:
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


def preference(package: DistributionPackage) -> tuple[Version, bool, int, tuple[int, str] | tuple[()]]:
    """Sort key of wheels: version, then the oldest CPython without free threading, then build number."""
    _, version, build, tags = parse_wheel_filename(package.filename)
    tag = min(tags, key=str)
    digits = tag.interpreter.removeprefix("cp")
    minor = int(digits[1:]) if tag.interpreter.startswith("cp") and digits[1:].isdigit() else 0
    return version, not tag.abi.endswith("t"), -minor, build


def pin_wheel(index: Index, package: DistributionPackage, prefix: str, take: tuple[str, ...]) -> PinnedFile:
    """Pin part of a wheel: the files under `prefix` whose names begin with one of `take`, and `RECORD`."""
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
    ranges: list[tuple[int, int]] = []
    unpacked = 0
    for info, end in zip(infos, ends, strict=True):
        inside = info.filename.removeprefix(prefix)
        kept = info.filename.startswith(prefix) and not info.is_dir() and inside.startswith(take)
        if not kept and info.filename != record_name:
            continue
        if info.flag_bits & 0x8 or (kept and info.filename not in hashes):
            raise ToolchainError(f"{info.filename}: has no sizes before its content, or no hash in RECORD", where=name)
        unpacked += info.file_size if kept else 0
        start = info.header_offset
        if ranges and start - ranges[-1][1] < _NEAR:
            start = ranges.pop()[0]
        ranges.append((start, end))
    if not unpacked:
        raise ToolchainError(f"has none of the files expected under {prefix}", where=name)
    return PinnedFile(
        project=canonicalize_name(package.project or ""),
        version=str(version_of(package)),
        file=name,
        size=size,
        sha256=package.digests["sha256"],
        record=hashlib.sha256(record).hexdigest(),
        ranges=tuple(ranges),
        fetched=_hash_ranges(index, package, ranges),
        prefix=prefix,
        take=take,
        unpacked=unpacked,
    )


def _hash_ranges(index: Index, package: DistributionPackage, ranges: Iterable[tuple[int, int]]) -> str:
    digest = hashlib.sha256()
    for start, stop in ranges:
        digest.update(index.read(package, start, stop))
    return digest.hexdigest()


def lacks(wanted: str, index: Index) -> FetchError:
    return FetchError(
        "the index does not have it", where=f"{wanted} at {index.url}", hint="set PIP_INDEX_URL to another index"
    )
