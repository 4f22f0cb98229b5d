"""From project directories to packages: read, select, plan, run, assemble, check, publish."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel_builder.build import ninja_run
from kernel_builder.build.plan import Graph, PlannedVariant, plan
from kernel_builder.config import offered
from kernel_builder.config.project import Project
from kernel_builder.config.project_files import read_project
from kernel_builder.config.variant import Variant, this_platform
from kernel_builder.errors import CheckError, ConfigError, PackageError, VariantError
from kernel_builder.package import assembly

if TYPE_CHECKING:
    from kernel_builder.checks import CheckReport
    from kernel_builder.toolchain import Obstacle, Toolchains


@dataclass(frozen=True)
class Request:
    """What to build.

    Attributes:
        directories: Project directories.
        variants: Names of exactly the variants to build; empty for all of this platform.
        backends: Only these backends; empty for all.
        whole: All that the matrix has, not only what the Hub asks for.
        out: Where packages go: `OUT/<variant>` for one project, `OUT/<name>/<variant>` for several. None for each
            project's own `build` directory.
        jobs: Processors to use at most; None for what this machine has free.
        compiler_cache: An sccache to put before the compilers.
        load: Load each package that this machine can load, as a check.
        provenance: What the packages' metadata says of builder and sources; None for what git says.
    """

    directories: tuple[Path, ...]
    variants: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    whole: bool = False
    out: Path | None = None
    jobs: int | None = None
    compiler_cache: Path | None = None
    load: bool = True
    provenance: Mapping[str, Any] | None = None


class Listener:
    """Told how a build goes along. The default says nothing."""

    def planned(self, variants: int, binaries: int) -> None:
        """The graph is made: so many variants share so many binaries."""

    def step(self, done: int, total: int, title: str) -> None:
        """A compile or link has ended."""

    def checking(self, name: str) -> None:
        """A package is being checked."""

    def say(self, message: str) -> None:
        """Something a person would want to know, one line."""


@dataclass(frozen=True)
class Built:
    """One package of a build.

    Attributes:
        status: `built`, or `unchanged` when the package was there already.
        shares: The other variants of this build with the same binary.
        size: Bytes of all files.
        report: What the checks said; None if unchanged, since they have seen these bytes.
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
class Unavailable:
    """A variant that the Hub asks for and no provider on this machine can build."""

    project: str
    variant: str
    reason: str
    hint: str

    def as_dict(self) -> dict[str, str]:
        return {"project": self.project, "variant": self.variant, "reason": self.reason, "hint": self.hint}


@dataclass(frozen=True)
class Summary:
    """What a build did.

    Attributes:
        skipped: Project name -> backends that are valid but not built here.
        steps, compiles: How many steps ran, and how many of them were compiles.
        cpu_seconds: Processor time of the compilers; None where a compiler cache's server ran them.
        seconds: Wall time of the whole build.
        warnings: Title of a step -> what its compiler said.
    """

    packages: tuple[Built, ...]
    unavailable: tuple[Unavailable, ...]
    skipped: Mapping[str, tuple[str, ...]]
    steps: int
    compiles: int
    cpu_seconds: float | None
    seconds: float
    warnings: Mapping[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return {
            "packages": [built.as_dict() for built in self.packages],
            "unavailable": [variant.as_dict() for variant in self.unavailable],
            "skipped-backends": {name: list(backends) for name, backends in self.skipped.items()},
            "steps": self.steps,
            "compiles": self.compiles,
            "cpu-seconds": None if self.cpu_seconds is None else round(self.cpu_seconds, 2),
            "seconds": round(self.seconds, 3),
            "warnings": dict(self.warnings),
        }


def obstacle(variant: Variant, toolchains: Toolchains) -> Obstacle | None:
    """Why this machine cannot build a variant, or None if it can."""
    from kernel_builder.toolchain import Obstacle

    if variant.platform is None:
        return None
    if variant.cuda is not None:
        return toolchains.cuda_obstacle(variant.cuda, variant.platform)
    if variant.platform != this_platform():
        return Obstacle(
            f"this machine is {this_platform()}",
            f"build it on a machine or CI runner with {variant.platform}, with the same command",
        )
    return None


def select(
    project: Project, request: Request, toolchains: Toolchains
) -> tuple[tuple[Variant, ...], tuple[Unavailable, ...]]:
    """The variants to build, and those that the matrix has and this machine cannot build.

    Raises:
        VariantError: If a variant asked for by name is unknown, not the project's, or cannot be built here; or if
            nothing is left to build.
    """
    if request.variants:
        chosen = []
        for name in dict.fromkeys(request.variants):
            variant = Variant.parse(name)
            offered.check_offered(project, variant)
            reason = obstacle(variant, toolchains)
            if reason:
                raise VariantError(f"cannot be built here: {reason.reason}", where=name, hint=reason.hint)
            chosen.append(variant)
        return tuple(chosen), ()
    buildable: list[Variant] = []
    unavailable: list[Unavailable] = []
    for variant in offered.variants(project, whole=request.whole):
        if request.backends and variant.backend not in request.backends:
            continue
        reason = obstacle(variant, toolchains)
        if reason is None:
            buildable.append(variant)
        else:
            unavailable.append(Unavailable(project.name, variant.name, reason.reason, reason.hint))
    if not buildable:
        backends = ", ".join(request.backends or project.backends)
        why = f"; {unavailable[0].variant}: {unavailable[0].reason}" if unavailable else ""
        raise VariantError(
            f"there is no variant to build here for the backends {backends}{why}",
            where=str(project.root),
            hint=unavailable[0].hint if unavailable else "this builder compiles for cpu and cuda",
        )
    return tuple(buildable), tuple(unavailable)


def build(request: Request, toolchains: Toolchains, listener: Listener | None = None) -> Summary:
    """Build every variant asked for of every project.

    Nothing in a project's `build` directory changes until all its packages are there and have passed their checks.

    Raises:
        KernelBuilderError: As `kernel_builder.errors` describes.
    """
    started = time.monotonic()
    cache = toolchains.cache
    listener = listener or Listener()
    selected = []
    unavailable: list[Unavailable] = []
    skipped = {}
    for directory in dict.fromkeys(path.resolve() for path in request.directories):
        project = read_project(directory)
        variants, missing = select(project, request, toolchains)
        selected.append((project, variants))
        unavailable += missing
        if offered.skipped_backends(project):
            skipped[project.name] = offered.skipped_backends(project)
    _refuse_equal_names([project for project, _ in selected])
    destinations = {project.root: _destination(project, request, len(selected)) for project, _ in selected}

    with ExitStack() as locks:
        for destination in sorted(destinations.values()):
            _lock(locks, cache, destination, listener)

        def is_split(key: str) -> bool:
            return ninja_run.split_path(cache, key).exists()

        graph = plan(selected, toolchains, is_split)
        listener.planned(len(graph.variants), len(graph.binaries))
        records = {project.root: request.provenance or assembly.provenance(project) for project, _ in selected}
        stale = [
            planned
            for planned in graph.variants
            if not _is_fresh(
                planned, records[planned.project.root], destinations[planned.project.root], cache, load=request.load
            )
        ]
        outcome = _run(Graph(tuple(stale)), request, cache, listener)
        while outcome.split:
            wanted = {(planned.project.root, planned.variant) for planned in stale}
            graph = plan(selected, toolchains, is_split)
            stale = [planned for planned in graph.variants if (planned.project.root, planned.variant) in wanted]
            again = _run(Graph(tuple(stale)), request, cache, listener)
            outcome = ninja_run.Outcome(
                steps=outcome.steps + again.steps,
                compiles=outcome.compiles + again.compiles,
                cpu_seconds=_sum(outcome.cpu_seconds, again.cpu_seconds),
                warnings={**outcome.warnings, **again.warnings},
                split=again.split,
            )
        reports: dict[tuple[Path, str], CheckReport] = {}
        for project, variants in selected:
            mine = [planned for planned in stale if planned.project.root == project.root]
            if mine:
                destination = destinations[project.root]
                gone = [] if request.variants or request.backends else _outdated(project, destination, variants)
                reports.update(
                    _package(
                        mine, destination, gone, records[project.root], cache, load=request.load, listener=listener
                    )
                )
    return Summary(
        packages=tuple(_built(planned, graph, destinations, reports) for planned in graph.variants),
        unavailable=tuple(unavailable),
        skipped=skipped,
        steps=outcome.steps,
        compiles=outcome.compiles,
        cpu_seconds=outcome.cpu_seconds,
        seconds=time.monotonic() - started,
        warnings=outcome.warnings,
    )


def _sum(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else first + second


def _refuse_equal_names(found: Sequence[Project]) -> None:
    names = [project.name for project in found]
    for project in found:
        if names.count(project.name) > 1:
            raise ConfigError(
                f"two of the projects are named {project.name}",
                where=str(project.root / "build.toml: [general] name"),
                hint="build them one at a time, or rename one",
            )


def _destination(project: Project, request: Request, count: int) -> Path:
    """Where a project's packages go, with links followed: what is swapped is the directory, not a link to it."""
    out = request.out or project.root / "build"
    path = Path(os.path.realpath(out / project.name if request.out and count > 1 else out))
    if path.exists() and not path.is_dir():
        raise PackageError("is a file; packages need a directory", where=str(path), hint="move it, or choose --out")
    return path


def _lock(locks: ExitStack, cache: Path, destination: Path, listener: Listener) -> None:
    from filelock import FileLock, Timeout

    from kernel_builder.errors import StoreError

    name = hashlib.sha256(os.fsencode(destination)).hexdigest()[:16]
    try:
        (cache / "locks").mkdir(parents=True, exist_ok=True)
        lock = FileLock(cache / "locks" / f"{name}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            listener.say(f"another build of {destination} is running; waiting for it")
            lock.acquire()
    except OSError as error:
        raise StoreError(
            f"the cache cannot be written: {error.strerror}",
            where=str(error.filename or cache),
            hint="set KERNEL_BUILDER_CACHE to a directory that can be written",
        ) from error
    locks.callback(lock.release)


def _record_path(planned: PlannedVariant, recorded: Mapping[str, Any], cache: Path) -> Path:
    return cache / "packages" / f"{assembly.package_key(planned, recorded)}.json"


def _is_fresh(
    planned: PlannedVariant, recorded: Mapping[str, Any], destination: Path, cache: Path, *, load: bool
) -> bool:
    """Whether the package is there, is what these inputs give, and has passed the checks that are asked for."""
    try:
        record = json.loads(_record_path(planned, recorded, cache).read_text())
    except (OSError, ValueError):
        return False
    checked = record.get("loaded") or not load
    return bool(checked and record.get("tree") == assembly.hash_tree(destination / planned.variant.name).value)


def _run(graph: Graph, request: Request, cache: Path, listener: Listener) -> ninja_run.Outcome:
    return ninja_run.run(
        graph,
        cache,
        jobs=request.jobs or ninja_run.default_jobs(),
        compiler_cache=request.compiler_cache,
        progress=listener.step,
        waiting=lambda: listener.say("another build is using the compilers; waiting for it"),
    )


def _outdated(project: Project, destination: Path, variants: Sequence[Variant]) -> list[str]:
    """Packages in the destination that the project does not offer any more.

    A variant that only this machine cannot build is kept: it may have been brought from another one.
    """
    kept = {variant.name for variant in offered.variants(project, whole=True)} | {v.name for v in variants}
    try:
        present = [entry.name for entry in destination.iterdir() if (entry / "metadata.json").is_file()]
    except OSError:
        return []
    return [name for name in present if name not in kept and re.match(r"torch", name)]


def _package(
    planned: Sequence[PlannedVariant],
    destination: Path,
    gone: Sequence[str],
    recorded: Mapping[str, Any],
    cache: Path,
    *,
    load: bool,
    listener: Listener,
) -> dict[tuple[Path, str], CheckReport]:
    """Assemble, check and publish the packages of one project."""
    from kernel_builder import checks

    reports: dict[tuple[Path, str], CheckReport] = {}
    with assembly.staging(destination) as staged:
        for one in planned:
            directory = staged / one.variant.name
            binary = ninja_run.binary_path(cache, one.binary) if one.binary else None
            assembly.assemble(one, binary, recorded, directory)
        trees = {one.variant.name: assembly.hash_tree(staged / one.variant.name).value for one in planned}
        for one in planned:
            listener.checking(f"{one.project.name} {one.variant.name}")
            report = checks.run(staged / one.variant.name, load=load)
            reports[one.project.root, one.variant.name] = report
        findings = [
            f"{name}: {finding.path}: {finding.message} [{finding.check}]\n    {finding.hint}"
            for (_, name), report in reports.items()
            for finding in report.findings
            if finding.severity == "error"
        ]
        if findings:
            raise CheckError(
                "the packages do not pass their checks:\n  " + "\n  ".join(dict.fromkeys(findings)),
                where=str(planned[0].project.root),
                hint=f"{destination} is as it was",
            )
        assembly.publish(staged, destination, replace_all=gone)
    for one in planned:
        record = _record_path(one, recorded, cache)
        temporary = record.with_suffix(f".{one.module}.tmp")
        # The packages are in place. Without the record the next build checks them again, and that is all.
        with suppress(OSError):
            record.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps({"tree": trees[one.variant.name], "loaded": load}))
            temporary.replace(record)
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    return reports


def _built(
    planned: PlannedVariant,
    graph: Graph,
    destinations: Mapping[Path, Path],
    reports: Mapping[tuple[Path, str], CheckReport],
) -> Built:
    path = destinations[planned.project.root] / planned.variant.name
    report = reports.get((planned.project.root, planned.variant.name))
    key = planned.binary.key if planned.binary else None
    return Built(
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
