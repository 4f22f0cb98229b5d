"""Writes a new lock from the index: the version of each component's files, and the byte ranges to fetch of them.

Of the wheels of one version, the newest build for the oldest CPython is pinned: the headers are the same in all. Only
the byte ranges that a build would fetch are downloaded, and each wheel's zip directory.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from functools import cache

from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version
from pypi_simple import DistributionPackage

from kernel_builder.config.variant import PLATFORMS, Release
from kernel_builder.progress import Progress
from kernel_builder.toolchain.components import Component, ComponentFile
from kernel_builder.toolchain.index import Index
from kernel_builder.toolchain.lock import ANY, Lock, PinnedFile, Tree
from kernel_format.errors import ToolchainError

# Two ranges closer than this many bytes are fetched as one: a request costs more than the bytes between.
_NEAR = 32_768


def resolve(index: Index, wanted: Iterable[Component], progress: Progress) -> Lock:
    """Return the lock for some components. A component without files is reported and left out."""
    pinned = {}
    for component in wanted:
        if not component.files:
            progress.say(f"{component.title}: left out, no index has it")
            continue
        trees = pinned[component.name] = _component(index, component)
        progress.say(f"{component.title}: {next(iter(trees.values())).version}")
    return pinned


def _component(index: Index, component: Component) -> dict[str, Tree]:
    first = component.files[0]
    of_platforms = {
        platform: tuple(_pin(index, _choose(index, file, platform), file) for file in component.files)
        for platform in ([ANY] if all(file.file for file in component.files) else PLATFORMS)
    }
    version = component.version or (_requirements(index, first.required_by)[0] if first.required_by else None)
    version = version or next(iter(of_platforms.values()))[-1].version
    return {
        platform: Tree(component.name, component.title, version, platform, files)
        for platform, files in of_platforms.items()
    }


def _choose(index: Index, file: ComponentFile, platform: str) -> DistributionPackage:
    if file.file:
        return index.file(file.project, file.file)
    versions = _versions(index, file)
    offered = for_platform(index.packages(file.project), platform)
    offered = [package for package in offered if version_of(package) in versions]
    if not offered:
        raise index.lacks(f"{file.project}{versions} for {platform}")
    return max(offered, key=preference)


def _versions(index: Index, file: ComponentFile) -> SpecifierSet:
    if file.release:
        return SpecifierSet(f"=={version_of(_newest(index, file.project, file.release))}")
    assert file.required_by
    version, requirements = _requirements(index, file.required_by)
    specifiers = [requirement.specifier for requirement in requirements if requirement.name == file.project]
    if not specifiers:
        raise index.lacks(f"{file.project} for {file.required_by}, which {version} does not require")
    return SpecifierSet(",".join(map(str, specifiers)))


def _newest(index: Index, project: str, release: Release) -> DistributionPackage:
    offered = of_release(index.packages(project), release)
    if not offered:
        raise index.lacks(f"{project} {release}")
    return max(offered, key=version_of)


@cache
def _requirements(index: Index, required_by: str) -> tuple[str, list[Requirement]]:
    project, _, release = required_by.partition(" ")
    wheel = _newest(index, project, Release.parse(release))
    with index.open(wheel) as archive:
        name = next((name for name in archive.namelist() if name.endswith(".dist-info/METADATA")), "METADATA")
        metadata = Metadata.from_email(archive.read(name), validate=False)
        return str(version_of(wheel)), metadata.requires_dist or []


def version_of(package: DistributionPackage) -> Version:
    """Return the version in a file's name; 0 if it has none."""
    try:
        return Version(package.version or "")
    except InvalidVersion:
        return Version("0")


def of_release(packages: Iterable[DistributionPackage], release: Release) -> list[DistributionPackage]:
    """Return the wheels of a release, without pre-releases and yanked files."""
    wheels = ((package, version_of(package)) for package in _wheels(packages))
    return [package for package, version in wheels if version.release[:2] == release and not version.is_prerelease]


def for_platform(packages: Iterable[DistributionPackage], platform: str) -> list[DistributionPackage]:
    """Return the wheels for a platform, without yanked files."""
    expected = re.compile(f"manylinux.*_{platform.partition('-')[0]}")
    return [
        package
        for package in _wheels(packages)
        if any(expected.fullmatch(tag.platform) for tag in parse_wheel_filename(package.filename)[3])
    ]


def _wheels(packages: Iterable[DistributionPackage]) -> Iterator[DistributionPackage]:
    return (package for package in packages if package.package_type == "wheel" and not package.is_yanked)


def preference(package: DistributionPackage) -> tuple[Version, bool, int, tuple[int, str] | tuple[()]]:
    """Sort key of wheels: version, then the oldest CPython without free threading, then build number."""
    _, version, build, tags = parse_wheel_filename(package.filename)
    tag = min(tags, key=str)
    digits = tag.interpreter.removeprefix("cp")
    minor = int(digits[1:]) if tag.interpreter.startswith("cp") and digits[1:].isdigit() else 0
    return version, not tag.abi.endswith("t"), -minor, build


def _pin(index: Index, package: DistributionPackage, file: ComponentFile) -> PinnedFile:
    """Pin part of a file: of a wheel the wanted files and `RECORD`, of a source distribution the whole."""
    if package.package_type == "wheel":
        record, ranges = _parts_of_wheel(index, package, file)
        content = b"".join(index.read(package, start, stop) for start, stop in ranges)
    else:
        record, content = None, index.read(package)
        ranges = [(0, len(content))]
    fetched = hashlib.sha256(content).hexdigest()
    return PinnedFile(
        project=canonicalize_name(package.project or ""),
        version=str(version_of(package)),
        file=package.filename,
        sha256=package.digests.get("sha256", fetched),
        record=record,
        ranges=tuple(ranges),
        fetched=fetched,
        prefix=file.prefix,
        take=file.take,
    )


def _parts_of_wheel(
    index: Index, package: DistributionPackage, file: ComponentFile
) -> tuple[str, list[tuple[int, int]]]:
    """Return the SHA-256 of a wheel's RECORD, and the byte ranges of it and of the wanted files."""
    with index.open(package) as archive:
        infos = sorted(archive.infolist(), key=lambda info: info.header_offset)
        ends = [*(info.header_offset for info in infos[1:]), archive.start_dir]
        record_name = next((i.filename for i in infos if i.filename.endswith(".dist-info/RECORD")), None)
        if record_name is None or "sha256" not in package.digests:
            raise ToolchainError("has no RECORD, or the index states no SHA-256 of it", where=package.filename)
        record = hashlib.sha256(archive.read(record_name)).hexdigest()
        ranges: list[tuple[int, int]] = []
        kept = 0
        for info, end in zip(infos, ends, strict=True):
            inside = info.filename.removeprefix(file.prefix)
            is_kept = info.filename.startswith(file.prefix) and not info.is_dir() and inside.startswith(file.take)
            if not is_kept and info.filename != record_name:
                continue
            if info.flag_bits & 0x8:
                raise ToolchainError(f"{info.filename} has no sizes before its content", where=package.filename)
            kept += is_kept
            start = info.header_offset
            if ranges and start - ranges[-1][1] < _NEAR:
                start = ranges.pop()[0]
            ranges.append((start, end))
    if not kept:
        raise ToolchainError(f"has none of the files expected under {file.prefix}", where=package.filename)
    return record, ranges
