"""From project directories to packages: read, select, plan, run, assemble, check, publish."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel_builder import files
from kernel_builder.build import buildable, ninja_run, provenance
from kernel_builder.build.buildable import UnavailableVariant
from kernel_builder.build.cache import binary_path
from kernel_builder.build.graph import Graph, PlannedVariant
from kernel_builder.build.plan import plan
from kernel_builder.config import offered
from kernel_builder.config.notices import notices
from kernel_builder.config.project import Project
from kernel_builder.config.project_files import read_project
from kernel_builder.config.variant import Variant
from kernel_builder.errors import CheckError, ConfigError, PackageError, StoreError
from kernel_builder.package import records
from kernel_builder.package.assembly import assemble
from kernel_builder.package.swap import publish, staging
from kernel_builder.package.tree_digest import hash_tree
from kernel_builder.progress import Progress, Silent

if TYPE_CHECKING:
    from kernel_builder.checks import CheckReport
    from kernel_builder.toolchain import Toolchains


@dataclass(frozen=True)
class BuildRequest:
    """What to build.

    Attributes:
        directories: Project directories.
        variants: Names of exactly the variants to build; empty for all of this platform.
        backends: Only these backends; empty for all.
        whole: All variants of the matrix, not only those that the Hub asks for.
        capabilities: Compile for these capabilities only, such as `9.0`; empty for all. `upload` refuses the packages.
        out: Where packages go: `OUT/<variant>` for one project, `OUT/<name>/<variant>` for several. None for each
            project's own `build` directory.
        jobs: Processors to use at most; None for as many as are free on this machine.
        compiler_cache: An sccache to put before the compilers.
        load: Load each package that this machine can load, as a check.
        provenance: What the packages' metadata records of builder and sources; None for what git says.
    """

    directories: tuple[Path, ...]
    variants: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    whole: bool = False
    capabilities: tuple[str, ...] = ()
    out: Path | None = None
    jobs: int | None = None
    compiler_cache: Path | None = None
    load: bool = True
    provenance: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class BuiltPackage:
    """One package of a build.

    Attributes:
        status: `built`, or `unchanged` if the package was there already.
        shares: The other variants of this build with the same binary.
        size: Bytes of all files.
        report: The result of the checks; None if unchanged, since an earlier build checked the same bytes.
    """

    project: str
    variant: str
    path: Path
    module: str
    status: str
    shares: tuple[str, ...]
    size: int
    report: CheckReport | None

    def as_dict(self) -> dict[str, Any]:
        """Return the package as `--json` prints it."""
        return {
            "project": self.project,
            "variant": self.variant,
            "path": str(self.path),
            "module": self.module,
            "status": self.status,
            "shares-binary-with": list(self.shares),
            "bytes": self.size,
            "checks": self.report.as_dict() if self.report else None,
        }


@dataclass(frozen=True)
class BuildSummary:
    """What a build did.

    Attributes:
        skipped: Project name -> backends that are valid but not built here.
        steps: How many steps ran.
        compiles: How many of them were compiles.
        cpu_seconds: Processor time of the compilers; None where a compiler cache's server ran them.
        seconds: Wall time of the whole build.
        warnings: Title of a step -> what its compiler printed.
        notices: What the projects' authors should know: warnings about `build.toml`, and what is not built.
    """

    packages: tuple[BuiltPackage, ...]
    unavailable: tuple[UnavailableVariant, ...]
    skipped: Mapping[str, tuple[str, ...]]
    steps: int
    compiles: int
    cpu_seconds: float | None
    seconds: float
    warnings: Mapping[str, str] = field(default_factory=dict)
    notices: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the summary as `--json` prints it."""
        return {
            "packages": [built.as_dict() for built in self.packages],
            "unavailable": [asdict(variant) for variant in self.unavailable],
            "skipped-backends": {name: list(backends) for name, backends in self.skipped.items()},
            "steps": self.steps,
            "compiles": self.compiles,
            "cpu-seconds": None if self.cpu_seconds is None else round(self.cpu_seconds, 2),
            "seconds": round(self.seconds, 3),
            "warnings": dict(self.warnings),
            "notices": list(self.notices),
        }


@dataclass(frozen=True)
class _Selection:
    """A project, its variants to build, those that cannot be built here, and where its packages go."""

    project: Project
    variants: tuple[Variant, ...]
    unavailable: tuple[UnavailableVariant, ...]
    destination: Path


def build(request: BuildRequest, toolchains: Toolchains, progress: Progress | None = None) -> BuildSummary:
    """Build the requested variants of every project.

    Nothing in a project's `build` directory changes before all its packages have been built and checked.

    Raises:
        KernelBuilderError: As `kernel_builder.errors` describes.
    """
    started = time.monotonic()
    progress = progress or Silent()
    selections = _select(request, toolchains)
    found = notices([selection.project for selection in selections])
    for notice in found:
        progress.say(f"warning: {notice}")
    with ExitStack() as locks:
        for destination in sorted(selection.destination for selection in selections):
            locks.enter_context(_locked(destination, toolchains.cache, progress))
        graph = _plan(request, selections, toolchains)
        progress.say(f"{len(graph.variants)} variants, {len(graph.binaries)} binaries")
        stale = [one for one in graph.variants if not _is_current(one, selections, toolchains.cache, request)]
        outcome = ninja_run.run(
            Graph(tuple(stale)),
            toolchains.cache,
            jobs=request.jobs or ninja_run.default_jobs(),
            compiler_cache=request.compiler_cache,
            progress=progress,
        )
        reports = _package_all(request, selections, stale, toolchains.cache, progress)
    skipped = {one.project.name: offered.skipped_backends(one.project) for one in selections}
    return BuildSummary(
        packages=tuple(_built(planned, graph, selections, reports) for planned in graph.variants),
        unavailable=tuple(variant for selection in selections for variant in selection.unavailable),
        skipped={name: backends for name, backends in skipped.items() if backends},
        steps=outcome.steps,
        compiles=outcome.compiles,
        cpu_seconds=outcome.cpu_seconds,
        seconds=time.monotonic() - started,
        warnings=outcome.warnings,
        notices=tuple(found),
    )


def _select(request: BuildRequest, toolchains: Toolchains) -> list[_Selection]:
    directories = list(dict.fromkeys(path.resolve() for path in request.directories))
    selections = []
    for directory in directories:
        project = offered.limited(read_project(directory), request.capabilities)
        unavailable: tuple[UnavailableVariant, ...] = ()
        if request.variants:
            variants = buildable.named(project, request.variants, toolchains)
        else:
            variants, unavailable = buildable.available(
                project, toolchains, backends=request.backends, whole=request.whole
            )
        destination = _destination(project, request, several=len(directories) > 1)
        selections.append(_Selection(project, variants, unavailable, destination))
    names = [selection.project.name for selection in selections]
    for selection in selections:
        if names.count(selection.project.name) > 1:
            raise ConfigError(
                f"two of the projects are named {selection.project.name}",
                where=str(selection.project.root / "build.toml: [general] name"),
                hint="build them one at a time, or rename one",
            )
    return selections


def _destination(project: Project, request: BuildRequest, *, several: bool) -> Path:
    """Return where a project's packages go. Links are followed: the directory is swapped, not a link to it."""
    out = request.out or project.root / "build"
    path = Path(os.path.realpath(out / project.name if request.out and several else out))
    if path.exists() and not path.is_dir():
        raise PackageError("is a file; packages need a directory", where=str(path), hint="move it, or choose --out")
    return path


@contextmanager
def _locked(destination: Path, cache: Path, progress: Progress) -> Iterator[None]:
    """Let one build at a time write to a destination. The next one then finds its packages unchanged."""
    name = hashlib.sha256(os.fsencode(destination)).hexdigest()[:16]
    with ExitStack() as lock:
        try:
            (cache / "locks").mkdir(parents=True, exist_ok=True)
            lock.enter_context(
                files.locked(
                    cache / "locks" / f"{name}.lock",
                    waiting=lambda: progress.say(f"another build of {destination} is running; waiting for it"),
                )
            )
        except OSError as error:
            raise StoreError(
                f"the cache cannot be written: {error.strerror}",
                where=str(error.filename or cache),
                hint="set KERNEL_BUILDER_CACHE to a directory that can be written",
            ) from error
        yield


def _plan(request: BuildRequest, selections: Sequence[_Selection], toolchains: Toolchains) -> Graph:
    recorded = {one.project.name: request.provenance or provenance.provenance(one.project) for one in selections}
    return plan([(one.project, one.variants) for one in selections], toolchains, recorded)


def _destinations(selections: Sequence[_Selection]) -> dict[str, Path]:
    return {selection.project.name: selection.destination for selection in selections}


def _is_current(planned: PlannedVariant, selections: Sequence[_Selection], cache: Path, request: BuildRequest) -> bool:
    package = _destinations(selections)[planned.project.name] / planned.variant.name
    return records.is_current(planned, package, cache, load=request.load)


def _package_all(
    request: BuildRequest,
    selections: Sequence[_Selection],
    stale: Sequence[PlannedVariant],
    cache: Path,
    progress: Progress,
) -> dict[tuple[str, str], CheckReport]:
    """Package the stale variants, one project after the other. Reports are by project and variant."""
    reports: dict[tuple[str, str], CheckReport] = {}
    for selection in selections:
        name = selection.project.name
        mine = [planned for planned in stale if planned.project.name == name]
        if mine:
            outdated = [] if request.variants or request.backends else _outdated(selection)
            found = _package(mine, selection.destination, outdated, cache, load=request.load, progress=progress)
            reports.update({(name, variant): report for variant, report in found.items()})
    return reports


def _outdated(selection: _Selection) -> list[str]:
    """Return the names of packages in the destination that the project no longer offers.

    A variant that only this machine cannot build is kept: it may have been copied from another machine.
    """
    kept = {variant.name for variant in (*offered.variants(selection.project, whole=True), *selection.variants)}
    try:
        present = [entry.name for entry in selection.destination.iterdir() if (entry / "metadata.json").is_file()]
    except OSError:
        return []
    return [name for name in present if name not in kept and re.match(r"torch", name)]


def _package(
    planned: Sequence[PlannedVariant],
    destination: Path,
    outdated: Sequence[str],
    cache: Path,
    *,
    load: bool,
    progress: Progress,
) -> dict[str, CheckReport]:
    """Assemble, check and publish packages of one project. Reports are by variant."""
    from kernel_builder import checks

    reports: dict[str, CheckReport] = {}
    with staging(destination) as staged:
        for one in planned:
            binary = binary_path(cache, one.binary) if one.binary else None
            assemble(one, binary, staged / one.variant.name)
        trees = {one.variant.name: hash_tree(staged / one.variant.name).value for one in planned}
        for number, one in enumerate(planned, 1):
            title = f"checking {one.project.name} {one.variant.name}"
            progress.advance("checking", number, len(planned), detail=title)
            reports[one.variant.name] = checks.run(staged / one.variant.name, load=load)
        _refuse_findings(reports, planned[0].project, destination)
        publish(staged, destination, replace_all=outdated)
    for one in planned:
        records.write(one, trees[one.variant.name], cache, load=load)
    return reports


def _refuse_findings(reports: Mapping[str, CheckReport], project: Project, destination: Path) -> None:
    findings = [
        f"{name}: {finding.path}: {finding.message} [{finding.check}]\n    {finding.hint}"
        for name, report in reports.items()
        for finding in report.findings
        if finding.severity == "error"
    ]
    if findings:
        raise CheckError(
            "the packages do not pass their checks:\n  " + "\n  ".join(dict.fromkeys(findings)),
            where=str(project.root),
            hint=f"{destination} is unchanged",
        )


def _built(
    planned: PlannedVariant,
    graph: Graph,
    selections: Sequence[_Selection],
    reports: Mapping[tuple[str, str], CheckReport],
) -> BuiltPackage:
    path = _destinations(selections)[planned.project.name] / planned.variant.name
    report = reports.get((planned.project.name, planned.variant.name))
    key = planned.binary.key if planned.binary else None
    return BuiltPackage(
        project=planned.project.name,
        variant=planned.variant.name,
        path=path,
        module=planned.module,
        status="built" if report else "unchanged",
        shares=tuple(
            other.variant.name
            for other in graph.variants
            if key and other.binary and other.binary.key == key and other.variant != planned.variant
        ),
        size=sum(file.stat().st_size for file in path.rglob("*") if file.is_file()),
        report=report,
    )
