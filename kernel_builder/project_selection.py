"""Which projects and variants a build is for, and where their packages go."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel_builder.build_summary import FailedVariant
from kernel_builder.config import notices, offered
from kernel_builder.config.project import KernelDependency, Project
from kernel_builder.config.project_files import read_project
from kernel_builder.config.variant import Variant
from kernel_builder.package import foreign_files
from kernel_builder.steps import buildable
from kernel_builder.steps.buildable import UnavailableVariant
from kernel_format.errors import ConfigError, KernelBuilderError, NothingToBuildError, PackageError, VariantError

if TYPE_CHECKING:
    from kernel_builder.checks import CheckReport
    from kernel_builder.steps.confinement import SandboxMode
    from kernel_builder.toolchain import Toolchains


@dataclass(frozen=True)
class BuildRequest:
    """What to build.

    Attributes:
        directories: Project directories.
        variants: Names of exactly the variants to build; empty for all of `platforms`.
        backends: Only these backends; empty for all.
        platforms: Only these platforms, of which others than this machine's are cross-compiled; empty for this one's.
        whole: All variants of the matrix, not only those that the Hub asks for.
        capabilities: Compile for these capabilities only, such as `9.0`; empty for all. `upload` refuses the packages.
        out: Where packages go: `OUT/<variant>` for one project, `OUT/<name>/<variant>` for several. None for each
            project's own `build` directory.
        owner: Who publishes the projects, in place of the owner that `build.toml` names; None for that one.
        jobs: Processors to use at most; None for as many as are free on this machine.
        allow_empty: Accept that no project has anything that this builder builds.
        load: Load each package that this machine can load, as a check.
        cross_python: A Python of another platform, by emulation, that loads its packages; None to leave that out.
        allow: Names of checks whose errors are reported as warnings, and recorded in the packages.
        provenance: What the packages' metadata records of builder and sources; None for what git says.
        sandbox: Run compilers, linkers and loaded packages in a sandbox: if the system has one (`auto`), or not at all
            without one (`require`), or never (`off`).
        resources: Also report what each kernel takes of the GPU, for which device code is compiled once more.
    """

    directories: tuple[Path, ...]
    variants: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    platforms: tuple[str, ...] = ()
    whole: bool = False
    capabilities: tuple[str, ...] = ()
    out: Path | None = None
    owner: str | None = None
    jobs: int | None = None
    allow_empty: bool = False
    load: bool = True
    cross_python: Path | None = None
    allow: tuple[str, ...] = ()
    provenance: Mapping[str, Any] | None = None
    sandbox: SandboxMode = "auto"
    resources: bool = False


@dataclass(frozen=True)
class Selection:
    """A project, where its packages go, its variants to build, and those that this machine cannot build.

    Attributes:
        name: The project's name; where several projects of the command have it, with the directory.
    """

    project: Project
    destination: Path
    name: str
    variants: tuple[Variant, ...] = ()
    unavailable: tuple[UnavailableVariant, ...] = ()

    def failed(self, variant: str, *errors: KernelBuilderError, report: CheckReport | None = None) -> FailedVariant:
        """Return the result for a variant of the project that is not built."""
        outdated = (self.destination / variant).exists()
        return FailedVariant(self.name, variant, errors, report, outdated)

    def provides(self, dependency: KernelDependency) -> bool:
        """Return whether packages of this project are what another one depends on."""
        project = self.project
        named = (project.hub_repo_id or project.name) in (dependency.repo_id, dependency.repo_id.partition("/")[2])
        return named and dependency.version in (None, project.version)

    def packages(self) -> list[Path]:
        """Return the packages that are there, of the variants of this build."""
        paths = (self.destination / variant.name for variant in self.variants)
        return [path for path in paths if (path / "metadata.json").is_file()]

    def outdated(self) -> list[str]:
        """Return the names of packages in the destination that the project no longer offers.

        A variant that only this machine cannot build is kept: it may have been copied from another machine. So are
        other kernels' packages, and whatever has files that are not of a package.
        """
        kept = {variant.name for variant in (*offered.variants(self.project, whole=True), *self.variants)}
        try:
            present = [entry for entry in self.destination.iterdir() if (entry / "metadata.json").is_file()]
        except OSError:
            return []
        mine = (entry for entry in present if entry.name not in kept and not foreign_files.foreign_file(entry))
        return [entry.name for entry in mine if foreign_files.is_of(entry, self.project.name)]


@dataclass(frozen=True)
class Selected:
    """The projects with something to build here, and what cannot be built of these and others."""

    selections: tuple[Selection, ...]
    unavailable: tuple[UnavailableVariant, ...]
    failures: tuple[FailedVariant, ...]


def select(request: BuildRequest, toolchains: Toolchains) -> Selected:
    """Read the projects, and choose the variants to build.

    Raises:
        KernelBuilderError: If the only project cannot be read, or no project has a variant to build here.
    """
    directories = list(dict.fromkeys(path.resolve() for path in request.directories))
    several = len(directories) > 1
    selections: list[Selection] = []
    elsewhere: list[UnavailableVariant] = []
    failures: list[FailedVariant] = []
    nothing = None
    for directory in directories:
        if several and directory.exists() and not (directory / "build.toml").exists():
            elsewhere.append(UnavailableVariant(directory.name, "", "not a project: there is no build.toml", ""))
            continue
        try:
            project = offered.limited(read_project(directory, request.owner), request.capabilities)
            selection, refused = _selection(project, request, toolchains, several=several)
            failures += refused
            # That packages would replace something else is better said before the compiler runs.
            names = [variant.name for variant in selection.variants]
            kernel = project.name if request.out else None  # a project in its own directory may have been renamed
            foreign_files.check_replaced(selection.destination, names, kernel)
            selections.append(selection)
        except VariantError as error:  # this machine can build no variant of the project
            nothing = nothing or error
            elsewhere.append(UnavailableVariant(project.name, "", error.message, error.hint or ""))
        except KernelBuilderError as error:
            if not several:
                raise
            failures.append(FailedVariant(directory.name, None, (error,)))
    if nothing and not selections and not failures:
        raise nothing
    if not request.allow_empty and not failures and not any(selection.variants for selection in selections):
        failures += map(_nothing, selections)
    places = Counter(selection.destination for selection in selections)
    failures += _doubles(selections, places)
    unique, cyclic = _ordered([selection for selection in selections if places[selection.destination] == 1])
    elsewhere += [variant for selection in unique for variant in selection.unavailable]
    return Selected(_named_apart(unique), tuple(elsewhere), (*failures, *cyclic))


def dependencies(selection: Selection, selections: Sequence[Selection]) -> dict[str, Selection]:
    """Return the projects of a command that one of them depends on, also through others, by repository."""
    depended: dict[str, Selection] = {}
    waiting = [selection]
    while waiting:
        for repo_id, other in _direct(waiting.pop(), selections).items():
            if repo_id not in depended:
                depended[repo_id] = other
                waiting.append(other)
    return depended


def _direct(selection: Selection, selections: Sequence[Selection]) -> dict[str, Selection]:
    project = selection.project
    tables = (project.kernel_depends, *project.backend_kernel_depends.values())
    named = [kernel for table in tables for kernel in table]
    return {kernel.repo_id: other for kernel in named for other in selections if other.provides(kernel)}


def _ordered(selections: Sequence[Selection]) -> tuple[tuple[Selection, ...], list[FailedVariant]]:
    """Return the projects, each after those that it depends on, and those that depend on themselves."""
    failures: list[FailedVariant] = []
    left = list(selections)
    while True:
        needs = {
            number: [left.index(other) for other in _direct(selection, left).values()]
            for number, selection in enumerate(left)
        }
        try:
            return tuple(left[number] for number in TopologicalSorter(needs).static_order()), failures
        except CycleError as error:
            cycle = [left[number] for number in error.args[1]]
            # Each is followed by one that depends on it, and the first is the last.
            path = " -> ".join(selection.name for selection in reversed(cycle))
            for selection in cycle[1:]:
                where = f"{selection.project.root}/build.toml: [general] kernel-depends"
                message = f"the kernels depend on each other: {path}"
                hint = "the client refuses this when it loads one; remove one of the dependencies"
                failures.append(FailedVariant(selection.name, None, (ConfigError(message, where=where, hint=hint),)))
            left = [selection for selection in left if selection not in cycle]


def _nothing(selection: Selection) -> FailedVariant:
    error = NothingToBuildError(
        f"there is nothing to build: {'; '.join(notices.of_project(selection.project))}",
        where=str(selection.project.root),
        hint="`--allow-empty` accepts that, for commands over many projects",
    )
    return FailedVariant(selection.name, None, (error,))


def _named_apart(selections: Sequence[Selection]) -> tuple[Selection, ...]:
    """Return the projects with their directories in the names that several have, as two versions of a kernel do."""
    count = Counter(selection.name for selection in selections)
    return tuple(
        replace(selection, name=f"{selection.name} ({selection.project.root.name})")
        if count[selection.name] > 1
        else selection
        for selection in selections
    )


def _selection(
    project: Project, request: BuildRequest, toolchains: Toolchains, *, several: bool
) -> tuple[Selection, list[FailedVariant]]:
    """Return the variants to build of a project, and those that were asked for by name and cannot be built."""
    selection = Selection(project, _destination(project, request, several=several), project.name)
    if not request.variants:
        if not request.backends and not set(project.backends) - set(offered.skipped_backends(project)):
            return selection, []  # all of its backends are skipped
        variants, unavailable = buildable.available(
            project, toolchains, backends=request.backends, platforms=request.platforms, whole=request.whole
        )
        return replace(selection, variants=variants, unavailable=unavailable), []
    chosen: list[Variant] = []
    refused: list[FailedVariant] = []
    for name in dict.fromkeys(request.variants):
        try:
            chosen += buildable.named(project, [name], toolchains)
        except VariantError as error:
            if not several and len(set(request.variants)) == 1:
                raise
            refused.append(selection.failed(name, error))
    return replace(selection, variants=tuple(chosen)), refused


def _doubles(selections: Sequence[Selection], places: Mapping[Path, int]) -> Iterator[FailedVariant]:
    """Yield the projects whose packages would go to one directory, where nothing could tell them apart."""
    for place in (place for place, projects in places.items() if projects > 1):
        sharing = [selection for selection in selections if selection.destination == place]
        roots = [str(selection.project.root) for selection in sharing]
        error = ConfigError(
            f"two of the projects are named {sharing[0].name}, and the packages of both would go to {place}",
            where=f"{roots[0]}/build.toml: [general] name",
            hint="leave out --out, build them one at a time, or rename one",
        )
        yield from (FailedVariant(root, None, (error,)) for root in roots)


def _destination(project: Project, request: BuildRequest, *, several: bool) -> Path:
    """Return where a project's packages go. Links are followed: the directory is swapped, not a link to it."""
    out = request.out or project.root / "build"
    path = Path(os.path.realpath(out / project.name if request.out and several else out))
    if path.exists() and not path.is_dir():
        raise PackageError("is a file; packages need a directory", where=str(path), hint="move it, or choose --out")
    if request.out:
        foreign_files.check_destination(path)
    return path
