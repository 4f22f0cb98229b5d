"""Writes a new lock from the index: the version of each component's files, and the byte ranges to fetch of them.

Of the wheels of one version, the newest build for the oldest CPython is pinned: the headers are the same in all. Only
the byte ranges that a build would fetch are downloaded, and each wheel's zip directory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from kernel_builder.config.variant import PLATFORMS, Release
from kernel_builder.progress import Progress
from kernel_builder.toolchain import dependencies, pins, tree_files
from kernel_builder.toolchain.components import Component, ComponentFile
from kernel_builder.toolchain.index import Index
from kernel_builder.toolchain.lock import ANY, Lock, PinnedComponent, PinnedFile
from kernel_format.errors import ToolchainError
from kernel_format.files import temporary_directory


def resolve(
    index: Index, wanted: Iterable[Component], progress: Progress, platforms: Sequence[str] = PLATFORMS
) -> Lock:
    """Return the lock for some components. A component without files is reported and left out."""
    components = list(wanted)
    torches = {file.release for component in components for file in component.files if file.project == "torch"}
    resolver = _Resolver(index, sorted(filter(None, torches)))
    pinned = {}
    for component in components:
        if not component.files:
            progress.say(f"{component.title}: left out, no index has it")
            continue
        pinned[component.name] = resolver.component(component, platforms)
        progress.say(f"{component.title}: {pinned[component.name].version}")
    return pinned


class _Resolver:
    """Chooses versions, and asks the index for each package's requirements once."""

    def __init__(self, index: Index, torches: Sequence[Release]) -> None:
        self._index, self._torches = index, torches
        self._required = cache(self._requirements)

    def component(self, component: Component, platforms: Sequence[str]) -> PinnedComponent:
        is_same = all(file.file for file in component.files)
        of_platforms = {
            platform: tuple(self._pin(file, platform) for file in component.files)
            for platform in ([ANY] if is_same else platforms)
        }
        if component.license:
            self._check_version(component, of_platforms[ANY])
        version = (
            component.version or self._version(component.files[0]) or next(iter(of_platforms.values()))[-1].version
        )
        return PinnedComponent(component.name, component.title, version, of_platforms, component.license)

    def _version(self, file: ComponentFile) -> str | None:
        """Return the version of the package that requires a file; None if the file is selected otherwise."""
        return self._required(file.required_by)[0] if file.required_by else None

    def _pin(self, file: ComponentFile, platform: str) -> PinnedFile:
        if file.file:
            package = pins.named(self._index, file.project, file.file)
            if package.package_type == "sdist":
                return pins.pin_sdist(self._index, package, file.prefix, file.take)
            return pins.pin_wheel(self._index, package, file.prefix, file.take)
        return pins.pin_part(
            self._index, file.project, self._specifier(file, platform), platform, file.prefix, file.take
        )

    def _specifier(self, file: ComponentFile, platform: str) -> SpecifierSet:
        if file.release:
            return SpecifierSet(f"=={pins.newest(self._index, file.project, file.release)}")
        assert file.required_by
        if file.required_by == "torch":
            return self._oldest_of_torch(file.project, platform)
        version, requirements = self._required(file.required_by)
        specifiers = [requirement.specifier for requirement in requirements if requirement.name == file.project]
        if not specifiers:
            raise pins.lacks(f"{file.project} for {file.required_by}, which {version} does not require", self._index)
        return SpecifierSet(",".join(map(str, specifiers)))

    def _requirements(self, required_by: str) -> tuple[str, tuple[Requirement, ...]]:
        project, _, release = required_by.partition(" ")
        offered = pins.of_release(self._index.packages(project), Release.parse(release))
        if not offered:
            raise pins.lacks(required_by, self._index)
        newest = max(offered, key=pins.version_of)
        return str(pins.version_of(newest)), tuple(pins.requirements_of(self._index, newest))

    def _oldest_of_torch(self, project: str, platform: str) -> SpecifierSet:
        """Return the oldest version of a package that a Torch release requires."""
        versions = []
        for release in self._torches:
            newest = pins.newest(self._index, "torch", release)
            wheels = pins.for_platform(self._index.packages("torch"), platform)
            wheel = max((wheel for wheel in wheels if pins.version_of(wheel) == newest), key=pins.preference)
            for requirement in pins.requirements_of(self._index, wheel):
                exact = (specifier for specifier in requirement.specifier if specifier.operator == "==")
                versions += [Version(specifier.version) for specifier in exact if requirement.name == project]
        if not versions:
            raise pins.lacks(f"{project}, which no pinned Torch release requires", self._index)
        return SpecifierSet(f"=={min(versions)}")

    def _check_version(self, component: Component, files: Sequence[PinnedFile]) -> None:
        """Raise unless the files of a header library state its version."""
        with temporary_directory() as directory:
            for pin in files:
                package = pins.named(self._index, pin.project, pin.file)
                slices = [memoryview(self._index.read(package, start, stop)) for start, stop in pin.ranges]
                tree_files.unpack(pin, slices, directory)
            stated = dependencies.stated_version(directory)
        if stated != component.version:
            raise ToolchainError(
                f"states version {stated}, expected {component.version}",
                where=f"{component.name} in dependencies.toml",
            )
