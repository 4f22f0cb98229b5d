"""Build the selected variants: plan, and for those that are not current compile, assemble, check and publish."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

from kernel_builder import checks
from kernel_builder.aot import generation
from kernel_builder.checks.findings import CheckReport, summary_lines
from kernel_builder.checks.fit import may_load, torch_versions
from kernel_builder.checks.load import ProbeProcess
from kernel_builder.config import offered
from kernel_builder.config.notices import notices
from kernel_builder.config.project import Project
from kernel_builder.config.variant import Noarch, Variant
from kernel_builder.package import records
from kernel_builder.package.assembly import assemble
from kernel_builder.package.swap import check_replaced, publish, staging
from kernel_builder.pipeline.selection import BuildRequest, Selection, dependencies, select
from kernel_builder.pipeline.summary import BuildSummary, BuiltPackage, FailedVariant
from kernel_builder.plural import counted
from kernel_builder.progress import Progress
from kernel_builder.steps import confinement, ninja_run, provenance, recorded_sources
from kernel_builder.steps.cache import output_path
from kernel_builder.steps.graph import Graph, Outcome, PlannedVariant
from kernel_builder.steps.plan import plan
from kernel_builder.toolchain import Toolchains
from kernel_format import files
from kernel_format.cache_directory import is_open_to_others
from kernel_format.errors import CheckError, FetchError, KernelBuilderError, PackageError, StoreError
from kernel_format.tree_digest import contents, is_unchanged


@dataclass(frozen=True)
class Target:
    """A planned variant, and the state of the package in its place."""

    selection: Selection
    planned: PlannedVariant
    record: records.CheckRecord | None  # the check record of the package, if it is current; None if it is not
    report: CheckReport | None = None  # the check results, if this build has made the package

    @property
    def name(self) -> str:
        return self.planned.variant.name

    @property
    def key(self) -> tuple[str, str]:
        return self.selection.name, self.name

    @property
    def path(self) -> Path:
        return self.selection.destination / self.name


def build(request: BuildRequest, toolchains: Toolchains, progress: Progress | None = None) -> BuildSummary:
    """Build the requested variants of every project.

    A failure does not stop the rest: the packages that were built and passed their checks are published, all packages
    of a project in one step. Where a variant fails, the package of an earlier build stays.
    """
    started = time.monotonic()
    progress, cache = progress or Progress(), toolchains.cache
    checks.require_allowable(request.allow)
    selected = select(request, toolchains)
    projects = [selection.project for selection in selected.selections]
    warnings = notices(projects)
    for warning in warnings:
        progress.say(f"warning: {warning}")
    shared = request.shared_cache
    for directory in filter(None, (cache, shared)):
        if is_open_to_others(directory):
            progress.say(f"warning: other users can write to the cache {directory}, and so change the build's output")
    if shared and not os.access(shared / "objects", os.R_OK | os.X_OK):
        progress.say(f"warning: the shared cache {shared} is not used: its directory `objects` cannot be read")
    with ExitStack() as stack:
        for destination in sorted(selection.destination for selection in selected.selections):
            stack.enter_context(exclusive(destination, cache, progress))
        run = _Run(request, toolchains, progress, selected.selections, list(selected.failures))
        targets = [target for selection in selected.selections for target in run.plan(selection)]
        graph = Graph(tuple(target.planned for target in targets))
        progress.say(f"{counted(len(graph.variants), 'variant')}, {counted(len(graph.binaries), 'binary')}")
        stale = [target for target in targets if not _is_current(target.record, request)]
        rebuilt = run.rebuild(stale) if stale or request.sandbox == "require" else []
        failed = {(failure.project, failure.variant) for failure in run.failures}
        results = {target.key: target for target in (*targets, *rebuilt) if target.key not in failed}
        packages = tuple(_package(target, list(results.values())) for target in results.values())
    skipped = {selection.name: offered.skipped_backends(selection.project) for selection in selected.selections}
    return BuildSummary(
        packages=packages,
        failures=tuple(run.failures),
        unavailable=selected.unavailable,
        skipped_backends={name: tuple(map(str, backends)) for name, backends in skipped.items() if backends},
        steps=run.outcome.steps,
        compiles=run.outcome.compiles,
        cpu_seconds=round(run.outcome.cpu_seconds, 2),
        seconds=round(time.monotonic() - started, 3),
        warnings=run.outcome.warnings,
        notices=tuple(warnings),
        sandbox=run.sandbox,
    )


@contextmanager
def exclusive(destination: Path, cache: Path, progress: Progress) -> Iterator[None]:
    """Let one build at a time write to a destination. The next one then finds its packages unchanged."""
    path = cache / "locks" / f"{hashlib.sha256(os.fsencode(destination)).hexdigest()[:16]}.lock"
    message = f"another build of {destination} is running; waiting for it"
    with ExitStack() as lock:
        with files.writing(cache):
            path.parent.mkdir(parents=True, exist_ok=True)
            lock.enter_context(files.locked(path, waiting=lambda: progress.say(message)))
        yield


def _is_current(record: records.CheckRecord | None, request: BuildRequest) -> bool:
    """Return whether a package matches its inputs and has passed its checks.

    A skipped load check runs as soon as the machine may be able to load the package.
    """
    if record is None or not request.load or "load" in record.passed:
        return record is not None
    return record.skipped.get("load") != records.NO_LOAD and record.conditions == _load_conditions()


def _load_conditions() -> str:
    """Return the versions of Python and Torch. If they change, a package that could not be loaded before may load."""
    return f"{sys.version} {dict(torch_versions())}"


@dataclass
class _Run:
    """One build, and its failures so far. Each step returns the targets to go on with."""

    request: BuildRequest
    toolchains: Toolchains
    progress: Progress
    selections: tuple[Selection, ...]
    failures: list[FailedVariant]
    outcome: Outcome = field(default_factory=Outcome)
    # By the author's project and the back end.
    generated: dict[tuple[Path, str], Project] = field(default_factory=dict)
    sandbox: str | None = None  # of compilers and loaded packages; None for no sandbox, or if nothing ran

    def fail(self, target: Target, *errors: KernelBuilderError, report: CheckReport | None = None) -> None:
        self.failures.append(target.selection.failed(target.name, *errors, report=report))

    def plan(self, selection: Selection) -> list[Target]:
        """Plan the variants of a project."""
        plans: list[PlannedVariant] = []
        unfetched: dict[tuple[object, object], FetchError] = {}
        for variant in selection.variants:
            tools = (variant.backend, variant.release)
            try:
                if tools in unfetched:  # ask the index once for files that it does not have
                    raise unfetched[tools]
                plans += self.planned(selection.project, variant)
            except StoreError:  # stops the build
                raise
            except KernelBuilderError as error:
                if isinstance(error, FetchError):
                    unfetched[tools] = error
                self.failures.append(selection.failed(variant.name, error))
        sources = {name for planned in plans for name in planned.sources[recorded_sources.FILES]}
        recorded = dict(self.request.provenance or provenance.provenance(selection.project, sources))
        if self.request.allow:
            recorded["allowed-checks"] = sorted(set(self.request.allow))
        complete = [replace(planned, provenance={**recorded, **planned.provenance}) for planned in plans]
        places = [selection.destination / planned.variant.name for planned in complete]
        return [
            Target(selection, planned, records.read(planned, path, self.toolchains.cache))
            for planned, path in zip(complete, places, strict=True)
        ]

    def planned(self, project: Project, variant: Variant) -> Sequence[PlannedVariant]:
        """Plan a variant. The binaries of a Python-only project are those of a generated one."""
        if project.ahead_of_time is None or isinstance(variant.framework, Noarch):
            return plan([(project, [variant])], self.toolchains).variants
        key = (project.root, variant.backend.name)
        generated = self.generated.get(key)
        if generated is None:
            title = f"{project.name} for {variant.backend.title}"
            self.progress.say(f"{title}: compiling its kernels ahead of time, if they are not in the cache")
            generated = generation.generate(
                project, variant.backend, self.toolchains, self.request.sandbox, self.request.jobs
            )
            self.generated[key] = generated
            if self.request.keep_generated:
                name = project.name if variant.backend.name == "cuda" else f"{project.name}-{variant.backend.name}"
                generation.write(generated, self.request.keep_generated / name)
        sources = recorded_sources.record_ahead_of_time(project)
        planned = plan([(generated, [variant])], self.toolchains).variants
        return [replace(each, sources=sources) for each in planned]

    def rebuild(self, targets: Sequence[Target]) -> list[Target]:
        """Build packages, and publish those that pass their checks, all of a project in one step."""
        sandbox = confinement.for_steps(self.request.sandbox, [target.planned for target in targets], self.progress)
        self.sandbox = sandbox.kind
        with ProbeProcess(confinement=sandbox) as probe:

            def start_probe() -> None:
                if self.request.load and any(may_load(target.planned.variant) for target in targets):
                    probe.start()

            self.outcome = ninja_run.run(
                Graph(tuple(target.planned for target in targets)),
                self.toolchains.cache,
                jobs=self.request.jobs or ninja_run.default_jobs(),
                shared=self.request.shared_cache,
                confinement=sandbox,
                progress=self.progress,
                idle=start_probe,  # imports Torch beside the last steps, and not if they fail
            )
            linked = []
            for target in targets:
                if errors := self.outcome.errors_of(target.planned.binary) if target.planned.binary else []:
                    self.fail(target, *errors)
                else:
                    linked.append(target)
            if linked:
                start_probe()
            by_project = [list(group) for _, group in groupby(linked, key=lambda target: target.selection.name)]
            return [target for project in by_project for target in self.publish(project, probe)]

    def publish(self, targets: Sequence[Target], probe: ProbeProcess) -> list[Target]:
        """Assemble and check packages of one project, and publish those that pass."""
        selection, cache = targets[0].selection, self.toolchains.cache
        passed = list(targets)
        try:
            with staging(selection.destination) as staged:
                for target in targets:
                    binary = target.planned.binary
                    try:
                        output = output_path(cache, binary) if binary else None
                        assemble(target.planned, output, staged / target.name)
                    except KernelBuilderError as error:
                        self.fail(target, error)
                        passed.remove(target)
                passed = self.check(passed, staged, probe) if passed else []
                names = [target.name for target in passed]
                for path in [path for path in staged.iterdir() if path.name not in names]:
                    # Without a sandbox, a package can also write beside itself when it is loaded.
                    files.remove_tree(path)
                if passed:
                    kernel = selection.project.name if self.request.out else None
                    check_replaced(selection.destination, names, kernel)  # a second build may have ended
                    is_whole = not (self.request.variants or self.request.backends)
                    publish(staged, selection.destination, outdated=selection.outdated() if is_whole else [])
        except StoreError:  # stops the build
            raise
        except KernelBuilderError as error:
            for target in passed:
                self.fail(target, error)
            return []
        for target in passed:
            assert target.record
            records.write(target.planned, target.record, cache)
        return passed

    def check(self, targets: Sequence[Target], staged: Path, probe: ProbeProcess) -> list[Target]:
        """Run all checks on the staged packages of a project."""
        selection = targets[0].selection
        paths = [staged / target.name for target in targets]
        before = [contents(path) for path in paths]
        others = {repo_id: other.packages() for repo_id, other in dependencies(selection, self.selections).items()}
        checked = checks.run_all(
            paths,
            load=self.request.load,
            allow=self.request.allow,
            project=selection.project,
            probe=probe,
            others=others,
        )
        reports = []
        for number, target in enumerate(targets, 1):
            title = f"checking {selection.name} {target.name}"
            self.progress.advance("checking", number, len(targets), detail=title)
            reports.append(next(checked))
        intact = []
        for target, path, content, report in zip(targets, paths, before, reports, strict=True):
            # Loading a package runs its code, which can write to it.
            if is_unchanged(path, content) and not probe.has_changed(path):
                # The conditions do not cover the kernels of the Hub's cache that a package may depend on.
                needs_others = report.package.metadata and report.package.metadata.kernel_depends
                conditions = None if needs_others else _load_conditions()
                sandbox = probe.confinement.kind
                record = records.CheckRecord(content[0], report.passed, report.skipped, conditions, sandbox)
                intact.append(replace(target, report=report, record=record))
                continue
            error = PackageError(
                f"the files of {target.name} changed while it was checked",
                where=str(selection.project.root),
                hint="its Python must not write into its own directory when it is imported",
            )
            self.fail(target, error)
        refused = {target.name: target.report for target in intact if target.report and not target.report.ok}
        if refused:
            refusal = _refusal(selection, refused, len(intact))
            for target in (target for target in intact if target.name in refused):
                self.fail(target, refusal, report=target.report)
        return [target for target in intact if target.name not in refused]


def _refusal(selection: Selection, refused: Mapping[str, CheckReport], number: int) -> CheckError:
    """Return one error for the packages of a project, of so many, that do not pass their checks."""
    kept = sum((selection.destination / name).exists() for name in refused)
    state = f"{counted(kept, 'earlier package')} unchanged" if kept else "no refused package is"
    names = {finding.check for report in refused.values() for finding in report.findings if finding.severity == "error"}
    if names <= set(checks.ALLOWABLE):
        options = " ".join(f"--allow {name}" for name in sorted(names))
        advice = f"correct the project, or turn its errors into warnings by {options}"
    else:
        advice = "correct the project, and build again"
    return CheckError(
        f"checks refuse {len(refused)} of {counted(number, 'package')} ({', '.join(sorted(names))}):\n  "
        + "\n  ".join(summary_lines(refused, "error", "`--json` lists all")),
        where=str(selection.project.root),
        hint=f"{state} in {selection.destination}; {advice}",
    )


def _package(target: Target, targets: Sequence[Target]) -> BuiltPackage:
    planned, record = target.planned, target.record
    assert record
    return BuiltPackage(
        project=target.selection.name,
        variant=target.name,
        path=target.path,
        module=planned.module,
        status="built" if target.report else "unchanged",
        shares_binary_with=tuple(
            other.name
            for other in targets
            if planned.binary and other.planned.binary and other.planned.binary.key == planned.binary.key
            if other.key != target.key
        ),
        bytes=sum(file.stat().st_size for file in target.path.rglob("*") if file.is_file()),
        passed_checks=record.passed,
        skipped_checks=record.skipped,
        sandbox=record.sandbox,
        checks=target.report,
    )
