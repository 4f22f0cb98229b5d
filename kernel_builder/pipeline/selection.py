"""Choose the projects and variants to build, and the destination of their packages."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from kernel_builder.checks.findings import CheckReport
from kernel_builder.config import known_backends, notices, offered
from kernel_builder.config.project import KernelDependency, Project
from kernel_builder.config.project_files import own_directory, read_project
from kernel_builder.config.variant import Variant
from kernel_builder.package.swap import check_replaced
from kernel_builder.pipeline.summary import FailedVariant
from kernel_builder.plural import listed
from kernel_builder.steps import buildable
from kernel_builder.steps.buildable import UnavailableVariant
from kernel_builder.steps.confinement import SandboxMode
from kernel_builder.toolchain import Toolchains
from kernel_format.errors import (
    ConfigError,
    KernelBuilderError,
    NothingToBuildError,
    PackageError,
    StoreError,
    VariantError,
)
from kernel_format.metadata import PackageMetadata


@dataclass(frozen=True)
class BuildRequest:
    """The arguments of a build."""

    directories: tuple[Path, ...]
    variants: tuple[str, ...] = ()  # build exactly the variants with these names; empty for all of `platforms`
    backends: tuple[str, ...] = ()  # build for these backends only; empty for all
    # Build for these platforms only, cross-compiling for others than this machine's; empty for this one's.
    platforms: tuple[str, ...] = ()
    whole: bool = False  # build the whole matrix, not only the variants that the Hub asks for
    # Compile for these capabilities only, such as `9.0`; empty for all. `upload` refuses the packages.
    capabilities: tuple[str, ...] = ()
    # The destination: `OUT/<variant>` for one project, `OUT/<name>/<variant>` for several. None for each project's own
    # `build` directory.
    out: Path | None = None
    owner: str | None = None  # the publisher of the projects, if it is not the owner that `build.toml` names
    jobs: int | None = None  # the most processors to use; None for all that are free
    load: bool = True  # load each package that this machine can load, as a check
    allow: tuple[str, ...] = ()  # names of checks whose errors are reported as warnings, and recorded in the packages
    # The builder and the sources, as the packages' metadata records them; None to ask git.
    provenance: Mapping[str, Any] | None = None
    # Run compilers, linkers and loaded packages in a sandbox: if the system has one (`auto`), always (`require`), or
    # never (`off`).
    sandbox: SandboxMode = "auto"
    # Copy the projects that Triton kernels are made into to directories below this one, for the author to read.
    keep_generated: Path | None = None
    # A second cache, of which objects and binaries are copied and which is never written.
    shared_cache: Path | None = None


@dataclass(frozen=True)
class Selection:
    """A project, the destination of its packages, and its variants."""

    project: Project
    destination: Path
    name: str  # the project's name; if several projects of the command have the same name, with the directory
    variants: tuple[Variant, ...] = ()
    unavailable: tuple[UnavailableVariant, ...] = ()  # the requested variants that this machine cannot build

    def failed(self, variant: str, *errors: KernelBuilderError, report: CheckReport | None = None) -> FailedVariant:
        """Return the failure of a variant of the project."""
        outdated = (self.destination / variant).exists()
        return FailedVariant(self.name, variant, errors, report, outdated)

    def provides(self, dependency: KernelDependency) -> bool:
        """Return whether this project is the dependency of another one."""
        project = self.project
        named = (project.hub_repo_id or project.name) in (dependency.repo_id, dependency.repo_id.partition("/")[2])
        return named and dependency.version in (None, project.version)

    def packages(self) -> list[Path]:
        """Return the existing packages of the variants of this build."""
        paths = (self.destination / variant.name for variant in self.variants)
        return [path for path in paths if (path / "metadata.json").is_file()]

    def outdated(self) -> list[str]:
        """Return the names of packages in the destination that the project no longer offers.

        It leaves out variants that only this machine cannot build, which may come from another machine, and packages
        of other kernels. Packages of old builders name no kernel.
        """
        kept = {variant.name for variant in (*offered.variants(self.project, whole=True), *self.variants)}
        try:
            entries = {entry.name: entry for entry in self.destination.iterdir() if Variant.find(entry.name)}
        except OSError:
            return []
        others = {name: PackageMetadata.read(entry) for name, entry in entries.items() if name not in kept}
        return [name for name, metadata in others.items() if metadata and metadata.name in {None, self.project.name}]


@dataclass(frozen=True)
class Selected:
    """The projects with variants to build here, and the variants and projects that cannot be built."""

    selections: tuple[Selection, ...]
    unavailable: tuple[UnavailableVariant, ...]
    failures: tuple[FailedVariant, ...]


def select(request: BuildRequest, toolchains: Toolchains) -> Selected:
    """Read the projects, and choose the variants to build."""
    directories = list(dict.fromkeys(path.resolve() for path in request.directories))
    several = len(directories) > 1
    selections: list[Selection] = []
    unavailable: list[UnavailableVariant] = []
    failures: list[FailedVariant] = []
    first_error = None
    for directory in directories:
        if several and directory.exists() and not (directory / "build.toml").exists():
            unavailable.append(UnavailableVariant(directory.name, "", "not a project: there is no build.toml", ""))
            continue
        try:
            project = offered.limited(read_project(directory, request.owner), request.capabilities)
            selection, refused = _selection(project, request, toolchains, several=several)
            failures += refused
            # Before the compiler runs, and again before the packages are published.
            names = [variant.name for variant in selection.variants]
            kernel = project.name if request.out else None  # a project in its own directory may have a new name
            check_replaced(selection.destination, names, kernel)
            if selection.destination in {other.destination for other in selections}:
                raise ConfigError(
                    f"two of the projects are named {project.name}, and both would write to {selection.destination}",
                    where=f"{directory}/build.toml: [general] name",
                    hint="leave out --out, build them one at a time, or rename one",
                )
            selections.append(selection)
        except VariantError as error:  # this machine can build no variant of the project
            first_error = first_error or error
            unavailable.append(UnavailableVariant(project.name, "", error.message, error.hint or ""))
        except StoreError:  # stops the build
            raise
        except KernelBuilderError as error:
            if not several:
                raise
            failures.append(FailedVariant(directory.name, None, (error,)))
    if first_error and not selections and not failures:
        raise first_error
    if not failures and not any(selection.variants for selection in selections):
        failures += map(_nothing, selections)
    unavailable += [variant for selection in selections for variant in selection.unavailable]
    return Selected(_named_apart(_ordered(selections)), tuple(unavailable), tuple(failures))


def dependencies(selection: Selection, selections: Sequence[Selection]) -> dict[str, Selection]:
    """Return the direct and indirect dependencies of a project among the projects of a command, by repository."""
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


def _ordered(selections: Sequence[Selection]) -> list[Selection]:
    """Return the projects, each after its dependencies."""
    needs = {
        number: [selections.index(other) for other in _direct(selection, selections).values()]
        for number, selection in enumerate(selections)
    }
    try:
        return [selections[number] for number in TopologicalSorter(needs).static_order()]
    except CycleError as error:
        # Each project is followed by one that depends on it; the last is the first.
        cycle = [selections[number] for number in reversed(error.args[1])]
        raise ConfigError(
            f"the kernels depend on each other: {' -> '.join(selection.name for selection in cycle)}",
            where=f"{cycle[0].project.root}/build.toml: [general] kernel-depends",
            hint="remove one of the dependencies: the client does not load such kernels",
        ) from error


def _nothing(selection: Selection) -> FailedVariant:
    compiled = listed(backend.name for backend in known_backends.compiled_for())
    error = NothingToBuildError(
        f"there is nothing to build: {'; '.join(notices.of_project(selection.project))}",
        where=str(selection.project.root),
        hint=f"leave the project out, or add {compiled} to `backends` in build.toml",
    )
    return FailedVariant(selection.name, None, (error,))


def _named_apart(selections: Sequence[Selection]) -> tuple[Selection, ...]:
    """Add the directory to names that several projects have, as two versions of a kernel do."""
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
    """Return the variants to build of a project, and the failures of named variants that cannot be built."""
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
            chosen.append(buildable.named(project, name, toolchains))
        except VariantError as error:
            if not several and len(set(request.variants)) == 1:
                raise
            refused.append(selection.failed(name, error))
    return replace(selection, variants=tuple(chosen)), refused


def _destination(project: Project, request: BuildRequest, *, several: bool) -> Path:
    """Return the destination of a project's packages, with links followed."""
    out = request.out or own_directory(project.root, "build")
    path = Path(os.path.realpath(out / project.name if request.out and several else out))
    if path.exists() and not path.is_dir():
        raise PackageError("is a file; packages need a directory", where=str(path), hint="move it, or choose --out")
    return path
