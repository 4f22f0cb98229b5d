"""From project directories to packages: read, select, plan, run, assemble, check, publish."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from kernel_builder import checks, files
from kernel_builder.build import ninja_run, provenance, recorded_sources, resources
from kernel_builder.build.cache import binary_path
from kernel_builder.build.confinement import for_steps
from kernel_builder.build.graph import Graph, PlannedVariant
from kernel_builder.build.plan import plan
from kernel_builder.build_summary import BuildSummary, BuiltPackage, FailedVariant
from kernel_builder.cache_directory import is_open_to_others
from kernel_builder.checks import CheckedPackage, CheckReport, ProbeProcess, summary
from kernel_builder.config import offered
from kernel_builder.config.notices import notices
from kernel_builder.config.variant import this_platform
from kernel_builder.errors import CheckError, FetchError, KernelBuilderError, PackageError, StoreError
from kernel_builder.package import foreign_files, records
from kernel_builder.package.assembly import assemble
from kernel_builder.package.swap import publish, staging
from kernel_builder.package.tree_digest import contents, is_unchanged
from kernel_builder.plural import counted
from kernel_builder.progress import Progress, Silent
from kernel_builder.project_selection import BuildRequest, Selection, dependencies, select

if TYPE_CHECKING:
    from kernel_builder.toolchain import Toolchains

__all__ = ["BuildRequest", "BuildSummary", "build"]


def build(request: BuildRequest, toolchains: Toolchains, progress: Progress | None = None) -> BuildSummary:
    """Build the requested variants of every project.

    What fails does not stop the rest: the packages that were built and passed their checks are published, those of a
    project at once. Where a variant fails, the package of an earlier build stays.

    Raises:
        KernelBuilderError: If there is nothing to build, for example since the only project cannot be read, or the
            cache cannot be written. Other errors are in the summary.
    """
    started = time.monotonic()
    progress, cache = progress or Silent(), toolchains.cache
    checks.require_allowable(request.allow)
    selected = select(request, toolchains)
    told = notices([selection.project for selection in selected.selections])
    for notice in told:
        progress.say(f"warning: {notice}")
    if is_open_to_others(cache):
        progress.say(f"warning: others can write to the cache {cache}, and so into what is built")
    with ExitStack() as stack:
        for destination in sorted(selection.destination for selection in selected.selections):
            stack.enter_context(_locked(destination, cache, progress))
        targets, unplanned = _split(
            result for selection in selected.selections for result in _plan(selection, request, toolchains)
        )
        graph = Graph(tuple(target.planned for target in targets))
        progress.say(f"{counted(len(graph.variants), 'variant')}, {counted(len(graph.binaries), 'binary')}")
        stale = [target for target in targets if not _is_current(target.record, request)]
        confinement = for_steps(request.sandbox, request.compiler_cache, [target.planned for target in stale], progress)
        checker = _Checker(
            request,
            progress,
            stack.enter_context(ProbeProcess(confinement=confinement)),
            stack.enter_context(ProbeProcess(str(request.cross_python))) if request.cross_python else None,
            selected.selections,
        )
        sound, unsound = _split(result for project in _by_project(stale) for result in checker.sources(project))
        outcome = ninja_run.run(
            Graph(tuple(target.planned for target in sound)),
            cache,
            jobs=request.jobs or ninja_run.default_jobs(),
            compiler_cache=request.compiler_cache,
            confinement=confinement,
            progress=progress,
        )
        made, unmade = _split(_made(target, outcome) for target in sound)
        if request.load and any(target.planned.variant.platform in (None, this_platform()) for target in made):
            checker.probe.start()
        packaged, refused = _split(
            result for project in _by_project(made) for result in _package(project, cache, checker)
        )
        failures = (*selected.failures, *unplanned, *unsound, *unmade, *refused)
        failed = {(failure.project, failure.variant) for failure in failures}
        results = {target.key: target for target in (*targets, *packaged) if target.key not in failed}
        packages = tuple(_built(target, list(results.values())) for target in results.values())
        reported = (
            resources.report(
                Graph(tuple(target.planned for target in results.values())),
                cache,
                jobs=request.jobs or ninja_run.default_jobs(),
                confinement=confinement,
                progress=progress,
            )
            if request.resources
            else ()
        )
    skipped = {selection.name: offered.skipped_backends(selection.project) for selection in selected.selections}
    return BuildSummary(
        packages=packages,
        failures=failures,
        unavailable=selected.unavailable,
        skipped={name: backends for name, backends in skipped.items() if backends},
        steps=outcome.steps,
        compiles=outcome.compiles,
        cpu_seconds=outcome.cpu_seconds,
        seconds=time.monotonic() - started,
        warnings=outcome.warnings,
        notices=tuple(told),
        resources=reported,
        sandbox=confinement.described(request.compiler_cache),
    )


@dataclass(frozen=True)
class _Target:
    """A planned variant, and what is known of the package in its place.

    Attributes:
        record: What the checks said when that package was built; None if it is not what the plan gives.
        report: The result of the checks, if this build has made the package.
    """

    selection: Selection
    planned: PlannedVariant
    record: records.CheckRecord | None
    report: CheckReport | None = None

    @property
    def name(self) -> str:
        return self.planned.variant.name

    @property
    def key(self) -> tuple[str, str]:
        return self.selection.name, self.name

    @property
    def path(self) -> Path:
        return self.selection.destination / self.name

    def failed(self, *errors: KernelBuilderError, report: CheckReport | None = None) -> FailedVariant:
        return self.selection.failed(self.name, *errors, report=report)


def _split(results: Iterable[_Target | FailedVariant]) -> tuple[list[_Target], list[FailedVariant]]:
    """Return the variants to go on with, and the others."""
    listed = list(results)
    failures = [result for result in listed if isinstance(result, FailedVariant)]
    return [result for result in listed if isinstance(result, _Target)], failures


def _by_project(targets: Iterable[_Target]) -> list[list[_Target]]:
    return [list(group) for _, group in groupby(targets, key=lambda target: target.selection.name)]


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


def _plan(selection: Selection, request: BuildRequest, toolchains: Toolchains) -> Iterator[_Target | FailedVariant]:
    """Plan the variants of a project."""
    plans: list[PlannedVariant] = []
    failures: list[FailedVariant] = []
    unfetched: dict[tuple[str, object], FetchError] = {}
    for variant in selection.variants:
        tools = (variant.backend, variant.release)
        try:
            if tools in unfetched:  # the index is not asked again for what it does not have
                raise unfetched[tools]
            plans += plan([(selection.project, [variant])], toolchains).variants
        except KernelBuilderError as error:
            if isinstance(error, FetchError):
                unfetched[tools] = error
            failures.append(selection.failed(variant.name, error))
    sources = {name for planned in plans for name in planned.sources[recorded_sources.FILES]}
    recorded = dict(request.provenance or provenance.provenance(selection.project, sources))
    if request.allow:
        recorded["allowed-checks"] = sorted(set(request.allow))
    for planned in plans:
        complete = replace(planned, provenance={**recorded, **planned.provenance})
        path = selection.destination / complete.variant.name
        yield _Target(selection, complete, records.read(complete, path, toolchains.cache))
    yield from failures


def _is_current(record: records.CheckRecord | None, request: BuildRequest) -> bool:
    """Return whether a package is what its inputs give and has passed its checks.

    A check that was skipped has not passed: it runs as soon as the machine may allow it.
    """
    if record is None or not request.load or "load" in record.passed:
        return record is not None
    return record.skipped.get("load") != checks.NO_LOAD and record.conditions == checks.load_conditions(
        request.cross_python
    )


def _made(target: _Target, outcome: ninja_run.Outcome) -> _Target | FailedVariant:
    """Return a variant if its binary has been made."""
    errors = outcome.errors_of(target.planned.binary) if target.planned.binary else []
    return target.failed(*errors) if errors else target


def _package(targets: Sequence[_Target], cache: Path, checker: _Checker) -> list[_Target | FailedVariant]:
    """Assemble and check packages of one project, and publish those that pass."""
    selection = targets[0].selection
    results: list[_Target | FailedVariant] = list(targets)
    try:
        with staging(selection.destination) as staged:
            results = [_assembled(target, cache, staged) for target in targets]
            assembled, unassembled = _split(results)
            results = [*unassembled, *checker.packages(assembled, staged)]
            passed, _ = _split(results)
            names = [target.name for target in passed]
            for path in [path for path in staged.iterdir() if path.name not in names]:
                # A package that is loaded without a sandbox can also write beside itself.
                files.remove_tree(path)
            if passed:
                foreign_files.check_replaced(selection.destination, names)  # what is there may be new
                every = not (checker.request.variants or checker.request.backends)
                publish(staged, selection.destination, replace_all=selection.outdated() if every else [])
    except KernelBuilderError as error:
        return [result.failed(error) if isinstance(result, _Target) else result for result in results]
    for target in passed:
        assert target.record
        records.write(target.planned, target.record, cache)
    return results


def _assembled(target: _Target, cache: Path, staged: Path) -> _Target | FailedVariant:
    binary = target.planned.binary
    try:
        assemble(target.planned, binary_path(cache, binary) if binary else None, staged / target.name)
    except KernelBuilderError as error:
        return target.failed(error)
    return target


@dataclass(frozen=True)
class _Checker:
    """How the packages of a build are checked, and by which processes."""

    request: BuildRequest
    progress: Progress
    probe: ProbeProcess
    cross_probe: ProbeProcess | None
    selections: tuple[Selection, ...]

    def sources(self, targets: Sequence[_Target]) -> list[_Target | FailedVariant]:
        """Check the sources of a project. Those of packages that cannot load are not worth a compile."""
        findings: dict[tuple[object, ...], tuple[checks.Finding, ...]] = {}  # by what the sources and ABI depend on
        in_python = self._in_python(next((target for target in targets if target.planned.binary), None))
        reports = []
        for target in targets:
            variant = target.planned.variant
            key = type(variant.framework), variant.backend, variant.release
            if key not in findings:
                findings[key] = (*in_python, *self._in_registrations(target))
            package = CheckedPackage(target.path, variant, None, project=target.selection.project)
            reports.append(CheckReport(package, (), {}, findings[key]))
        return _passing(targets, reports)

    def _in_python(self, target: _Target | None) -> Sequence[checks.Finding]:
        """Return what is wrong with the Python files of a package, if it has to be compiled."""
        if target is None:
            return ()
        try:
            with files.temporary_directory() as staged:
                package = staged / target.name
                assemble(target.planned, None, package)
                (report,) = checks.run_all(
                    [package],
                    only=checks.BEFORE_COMPILING,
                    load=False,
                    allow=self.request.allow,
                    project=target.selection.project,
                )
        except (KernelBuilderError, OSError):
            return ()  # what prevents this prevents the package too, which says so
        return report.findings

    def _in_registrations(self, target: _Target) -> Sequence[checks.Finding]:
        """Return how sources register ops as Torch does not accept them."""
        if not self.request.load or "ops" in self.request.allow:
            return ()
        return checks.check_op_sources(target.selection.project, target.planned.variant, self.probe)

    def packages(self, targets: Sequence[_Target], staged: Path) -> list[_Target | FailedVariant]:
        """Run all checks on the staged packages of a project."""
        if not targets:
            return []
        selection, project = targets[0].selection, targets[0].selection.project
        paths = [staged / target.name for target in targets]
        before = [contents(path) for path in paths]
        checked = checks.run_all(
            paths,
            load=self.request.load,
            allow=self.request.allow,
            probe=self.probe,
            cross_probe=self.cross_probe,
            project=project,
            others={repo_id: other.packages() for repo_id, other in dependencies(selection, self.selections).items()},
        )
        reports, failures, intact = [], [], []
        for number, target in enumerate(targets, 1):
            title = f"checking {selection.name} {target.name}"
            self.progress.advance("checking", number, len(targets), detail=title)
            reports.append(next(checked))
        for target, path, content, report in zip(targets, paths, before, reports, strict=True):
            # Loading a package runs its code, which can write to it.
            if not is_unchanged(path, content) or self.probe.has_changed(path):
                failures.append(target.failed(_changed(target)))
            else:
                intact.append(replace(target, report=report, record=self._record(target, content[0], report)))
        return [*failures, *_passing(intact, [target.report for target in intact if target.report])]

    def _record(self, target: _Target, tree: str, report: CheckReport) -> records.CheckRecord:
        # Whether the Hub's cache has the other kernels that a package needs is not among the conditions.
        needs_others = report.package.metadata and report.package.metadata.kernel_depends
        conditions = None if needs_others else checks.load_conditions(self.request.cross_python)
        sandbox = self.probe.confinement.described(self.request.compiler_cache)
        if target.planned.variant.platform not in (None, this_platform()):
            sandbox["load"] = None  # the Python of another platform runs without one
        return records.CheckRecord(tree, report.passed, report.skipped, conditions, sandbox)


def _changed(target: _Target) -> PackageError:
    return PackageError(
        f"the files of {target.name} changed while it was checked",
        where=str(target.selection.project.root),
        hint="its Python must not write into its own directory when it is imported",
    )


def _passing(targets: Sequence[_Target], reports: Sequence[CheckReport]) -> list[_Target | FailedVariant]:
    """Return the variants of a project that pass their checks, and failures with one error for all others."""
    refused = {target.name: report for target, report in zip(targets, reports, strict=True) if not report.ok}
    if not refused:
        return list(targets)
    selection = targets[0].selection
    kept = sum((selection.destination / name).exists() for name in refused)
    left = f"{counted(kept, 'earlier package')} unchanged" if kept else "no refused package is"
    names = {finding.check for report in refused.values() for finding in report.findings if finding.severity == "error"}
    lines = summary.lines(refused, "error", "`--json` lists all")
    error = CheckError(
        f"checks refuse {len(refused)} of {counted(len(reports), 'package')} ({', '.join(sorted(names))}):\n  "
        + "\n  ".join(lines),
        where=str(selection.project.root),
        hint=f"{left} in {selection.destination}; {_allow_hint(names)}",
    )
    return [
        target.failed(error, report=refused[target.name]) if target.name in refused else target for target in targets
    ]


def _allow_hint(names: set[str]) -> str:
    options = " ".join(f"--allow {name}" for name in sorted(names))
    if names <= set(checks.ALLOWABLE):
        return f"correct the project, or turn its errors into warnings by {options}"
    return "correct the project, and build again"


def _built(target: _Target, built: Sequence[_Target]) -> BuiltPackage:
    planned, record = target.planned, target.record
    assert record
    return BuiltPackage(
        project=target.selection.name,
        variant=target.name,
        path=target.path,
        module=planned.module,
        status="built" if target.report else "unchanged",
        shares=tuple(
            other.name
            for other in built
            if planned.binary and other.planned.binary and other.planned.binary.key == planned.binary.key
            if other.key != target.key
        ),
        size=sum(file.stat().st_size for file in target.path.rglob("*") if file.is_file()),
        passed=record.passed,
        skipped=record.skipped,
        sandbox=record.sandbox,
        report=target.report,
    )
