"""From project directories to packages: read, select, plan, run, assemble, check, publish."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kernel_builder import checks, files
from kernel_builder.build import confinement, ninja_run, provenance
from kernel_builder.build.cache import binary_path
from kernel_builder.build.graph import Graph, PlannedVariant
from kernel_builder.build.plan import plan
from kernel_builder.build_summary import BuildSummary, BuiltPackage, FailedVariant, Failures
from kernel_builder.checks import CheckedPackage, CheckReport, ProbeProcess, summary
from kernel_builder.config import offered
from kernel_builder.config.notices import notices
from kernel_builder.config.project import Project
from kernel_builder.config.variant import Variant, this_platform
from kernel_builder.errors import CheckError, FetchError, KernelBuilderError, PackageError, StoreError
from kernel_builder.package import foreign_files, records
from kernel_builder.package.assembly import assemble
from kernel_builder.package.swap import publish, staging
from kernel_builder.package.tree_digest import contents, hash_tree
from kernel_builder.plural import counted
from kernel_builder.progress import Progress, Silent
from kernel_builder.project_selection import BuildRequest, Selection, select

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
    progress = progress or Silent()
    checks.require_allowable(request.allow)
    failures = Failures()
    selections, unavailable = select(request, toolchains, failures)
    told = notices([selection.project for selection in selections])
    for notice in told:
        progress.say(f"warning: {notice}")
    with ExitStack() as locks:
        for destination in sorted(selection.destination for selection in selections):
            locks.enter_context(_locked(destination, toolchains.cache, progress))
        graph = _plan(request, selections, toolchains, failures)
        progress.say(f"{counted(len(graph.variants), 'variant')}, {counted(len(graph.binaries), 'binary')}")
        known = {id(one): _record(one, selections, toolchains.cache) for one in graph.variants}
        stale = [one for one in graph.variants if not _is_current(known[id(one)], request)]
        where = confinement.for_steps(request.sandbox, request.compiler_cache, stale, progress)
        probe = locks.enter_context(ProbeProcess(confinement=where))
        if request.load and "ops" not in request.allow:
            stale = _with_sound_ops(stale, selections, failures, probe)
        outcome = ninja_run.run(
            Graph(tuple(stale)),
            toolchains.cache,
            jobs=request.jobs or ninja_run.default_jobs(),
            compiler_cache=request.compiler_cache,
            confinement=where,
            progress=progress,
        )
        made = _made(stale, outcome, failures)
        if request.load and any(one.variant.platform in (None, this_platform()) for one in made):
            probe.start()
        cross = locks.enter_context(_cross_probe(request))
        check = partial(checks.run_all, load=request.load, allow=request.allow, probe=probe, cross_probe=cross)
        reports = _package_all(request, selections, made, toolchains.cache, failures, progress, check, probe)
        failed = {(one.project, one.variant) for one in failures.found}
        done = [one for one in graph.variants if (one.project.name, one.variant.name) not in failed]
        sandboxes = where.described(request.compiler_cache)
        packages = tuple(
            _built(one, done, selections, reports, known[id(one)], _sandboxes(where, request, one.variant))
            for one in done
        )
        found = tuple(_with_old_package(one, selections) for one in failures.found)
    skipped = {one.project.name: offered.skipped_backends(one.project) for one in selections}
    return BuildSummary(
        packages=packages,
        failures=found,
        unavailable=(*unavailable, *(variant for selection in selections for variant in selection.unavailable)),
        skipped={name: backends for name, backends in skipped.items() if backends},
        steps=outcome.steps,
        compiles=outcome.compiles,
        cpu_seconds=outcome.cpu_seconds,
        seconds=time.monotonic() - started,
        warnings=outcome.warnings,
        notices=tuple(told),
        sandbox=sandboxes,
    )


def _cross_probe(request: BuildRequest) -> AbstractContextManager[ProbeProcess | None]:
    return ProbeProcess(str(request.cross_python)) if request.cross_python else nullcontext()


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


def _plan(request: BuildRequest, selections: Sequence[Selection], toolchains: Toolchains, failures: Failures) -> Graph:
    """Plan all variants that can be planned."""
    planned: list[PlannedVariant] = []
    for selection in selections:
        try:
            found = plan([(selection.project, selection.variants)], toolchains).variants
        except KernelBuilderError:
            found = tuple(_plan_each(selection, toolchains, failures))
        steps = [step for one in found if one.binary for step in one.binary.objects]
        sources = {name for step in steps for name, _ in step.files}
        recorded = dict(request.provenance or provenance.provenance(selection.project, sources))
        if request.allow:
            recorded["allowed-checks"] = sorted(set(request.allow))
        planned += [replace(one, provenance={**recorded, **one.provenance}) for one in found]
    return Graph(tuple(planned))


def _plan_each(selection: Selection, toolchains: Toolchains, failures: Failures) -> Iterator[PlannedVariant]:
    """Plan the variants of a project one at a time, since one of them cannot be planned."""
    project = selection.project
    unfetched: dict[tuple[str, object], FetchError] = {}
    for variant in selection.variants:
        tools = (variant.backend, variant.release)
        if tools in unfetched:  # the index is not asked again for what it does not have
            failures.add(project.name, variant.name, unfetched[tools])
            continue
        try:
            yield from plan([(project, [variant])], toolchains).variants
        except KernelBuilderError as error:
            if isinstance(error, FetchError):
                unfetched[tools] = error
            failures.add(project.name, variant.name, _known(error, failures))


def _known(error: KernelBuilderError, failures: Failures) -> KernelBuilderError:
    """Return an equal error that is known already, so that it counts once."""
    known = (other for failed in failures.found for other in failed.errors)
    return next((other for other in known if other.as_dict() == error.as_dict()), error)


def _with_sound_ops(
    stale: Sequence[PlannedVariant], selections: Sequence[Selection], failures: Failures, probe: ProbeProcess
) -> list[PlannedVariant]:
    """Return the variants whose sources register ops as Torch accepts them. The others are not worth a compile."""
    sound: list[PlannedVariant] = []
    for selection in selections:
        project = selection.project
        mine = [one for one in stale if one.project.name == project.name]
        known: dict[tuple[object, ...], tuple[checks.Finding, ...]] = {}  # by what the sources and their ABI depend on
        reports: dict[str, CheckReport] = {}
        for one in mine:
            variant = one.variant
            key = type(variant.framework), variant.backend, variant.release
            if key not in known:
                known[key] = tuple(checks.check_op_sources(project, variant, probe))
            package = CheckedPackage(selection.destination / variant.name, variant, None, project=project)
            reports[variant.name] = CheckReport(package, (), {}, known[key])
        refused = _refused(reports, project, selection.destination, failures)
        sound += [one for one in mine if one.variant.name not in refused]
    return sound


def _made(stale: Sequence[PlannedVariant], outcome: ninja_run.Outcome, failures: Failures) -> list[PlannedVariant]:
    """Return the variants whose binaries have been made."""
    made = []
    for one in stale:
        errors = outcome.errors_of(one.binary) if one.binary else []
        if errors:
            failures.add(one.project.name, one.variant.name, *errors)
        else:
            made.append(one)
    return made


def _destinations(selections: Sequence[Selection]) -> dict[str, Path]:
    return {selection.project.name: selection.destination for selection in selections}


def _is_current(record: records.CheckRecord | None, request: BuildRequest) -> bool:
    """Return whether a package is what its inputs give and has passed its checks.

    A check that was skipped has not passed: it runs as soon as the machine may allow it.
    """
    if record is None or not request.load or "load" in record.passed:
        return record is not None
    return record.skipped.get("load") != checks.NO_LOAD and record.conditions == checks.load_conditions(
        request.cross_python
    )


def _record(planned: PlannedVariant, selections: Sequence[Selection], cache: Path) -> records.CheckRecord | None:
    return records.read(planned, _destinations(selections)[planned.project.name] / planned.variant.name, cache)


def _package_all(
    request: BuildRequest,
    selections: Sequence[Selection],
    made: Sequence[PlannedVariant],
    cache: Path,
    failures: Failures,
    progress: Progress,
    check: Callable[..., Iterator[CheckReport]],
    probe: ProbeProcess,
) -> dict[tuple[str, str], CheckReport]:
    """Package variants, one project after the other. Reports are by project and variant."""
    reports: dict[tuple[str, str], CheckReport] = {}
    for selection in selections:
        name = selection.project.name
        mine = [planned for planned in made if planned.project.name == name]
        if not mine:
            continue
        try:
            found = _package(mine, selection, request, cache, failures, progress, check, probe)
        except KernelBuilderError as error:
            for one in mine:
                if not any((name, one.variant.name) == (failed.project, failed.variant) for failed in failures.found):
                    failures.add(name, one.variant.name, error)
            continue
        reports.update({(name, variant): report for variant, report in found.items()})
    return reports


def _package(
    planned: Sequence[PlannedVariant],
    selection: Selection,
    request: BuildRequest,
    cache: Path,
    failures: Failures,
    progress: Progress,
    check: Callable[..., Iterator[CheckReport]],
    probe: ProbeProcess,
) -> dict[str, CheckReport]:
    """Assemble and check packages of one project, and publish those that pass. Reports are by variant."""
    project, destination = selection.project, selection.destination
    with staging(destination) as staged:
        assembled = []
        for one in planned:
            try:
                assemble(one, binary_path(cache, one.binary) if one.binary else None, staged / one.variant.name)
                assembled.append(one)
            except KernelBuilderError as error:
                shutil.rmtree(staged / one.variant.name, ignore_errors=True)
                failures.add(project.name, one.variant.name, _known(error, failures))
        trees = {one.variant.name: hash_tree(staged / one.variant.name).value for one in assembled}
        before = {name: contents(staged / name) for name in trees}
        reports: dict[str, CheckReport] = {}
        checked = check([staged / one.variant.name for one in assembled], project=project)
        for number, one in enumerate(assembled, 1):
            title = f"checking {project.name} {one.variant.name}"
            progress.advance("checking", number, len(assembled), detail=title)
            reports[one.variant.name] = next(checked)
        changed = [
            name for name in trees if contents(staged / name) != before[name] or probe.has_changed(staged / name)
        ]
        for name in changed:
            # Loading a package runs its code, which can write to it.
            shutil.rmtree(staged / name)
            failures.add(project.name, name, _changed(project, name))
            del reports[name], trees[name]
        passed = {name: report for name, report in reports.items() if report.ok}
        _refused(reports, project, destination, failures)
        for path in [path for path in staged.iterdir() if path.name not in passed]:
            # A package that is loaded without a sandbox can also write beside itself.
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        if passed:
            foreign_files.check_replaced(destination, passed)  # what is there may be new
            outdated = [] if request.variants or request.backends else selection.outdated()
            publish(staged, destination, replace_all=outdated)
    for one in assembled:
        if report := passed.get(one.variant.name):
            # Whether the Hub's cache has the other kernels that a package needs is not among the conditions.
            needs_others = report.package.metadata and report.package.metadata.kernel_depends
            conditions = None if needs_others else checks.load_conditions(request.cross_python)
            tree = trees[one.variant.name]
            sandboxes = _sandboxes(probe.confinement, request, one.variant)
            record = records.CheckRecord(tree, report.passed, report.skipped, conditions, sandboxes)
            records.write(one, record, cache)
    return passed


def _sandboxes(where: confinement.Confinement, request: BuildRequest, variant: Variant) -> Mapping[str, str | None]:
    """Return what confines a variant's steps and its load. The Python of another platform runs without a sandbox."""
    described = where.described(request.compiler_cache)
    return described if variant.platform in (None, this_platform()) else {**described, "load": None}


def _changed(project: Project, variant: str) -> PackageError:
    return PackageError(
        f"the files of {variant} changed while it was checked",
        where=str(project.root),
        hint="its Python must not write into its own directory when it is imported",
    )


def _refused(reports: Mapping[str, CheckReport], project: Project, destination: Path, failures: Failures) -> list[str]:
    """Return the variants that do not pass their checks, and note one error for all of them."""
    refused = {name: report for name, report in reports.items() if not report.ok}
    if not refused:
        return []
    kept = sum((destination / name).exists() for name in refused)
    left = f"{counted(kept, 'earlier package')} unchanged" if kept else "no refused package is"
    names = {finding.check for report in refused.values() for finding in report.findings if finding.severity == "error"}
    found = summary.lines(refused, "error", "`--json` lists all")
    error = CheckError(
        f"checks refuse {len(refused)} of {counted(len(reports), 'package')} ({', '.join(sorted(names))}):\n  "
        + "\n  ".join(found),
        where=str(project.root),
        hint=f"{left} in {destination}; {_allow_hint(names)}",
    )
    for name, report in refused.items():
        failures.add(project.name, name, error, report=report)
    return list(refused)


def _allow_hint(names: set[str]) -> str:
    options = " ".join(f"--allow {name}" for name in sorted(names))
    if names <= set(checks.ALLOWABLE):
        return f"correct the project, or turn its errors into warnings by {options}"
    return "correct the project, and build again"


def _with_old_package(failed: FailedVariant, selections: Sequence[Selection]) -> FailedVariant:
    destination = _destinations(selections).get(failed.project)
    old = destination is not None and failed.variant is not None and (destination / failed.variant).exists()
    return replace(failed, outdated=old)


def _built(
    planned: PlannedVariant,
    done: Sequence[PlannedVariant],
    selections: Sequence[Selection],
    reports: Mapping[tuple[str, str], CheckReport],
    record: records.CheckRecord | None,
    sandboxes: Mapping[str, str | None],
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
            for other in done
            if key and other.binary and other.binary.key == key and other.variant != planned.variant
        ),
        size=sum(file.stat().st_size for file in path.rglob("*") if file.is_file()),
        passed=report.passed if report else record.passed if record else (),
        skipped=report.skipped if report else record.skipped if record else {},
        sandbox=sandboxes if report else record.sandbox if record else {},
        report=report,
    )
