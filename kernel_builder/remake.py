"""Makes the packages of targets that are not current: compiles, assembles, checks, publishes.

`pipeline` imports this module, and with it the runner of compilers and all checks, only if there are such targets.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from kernel_builder import checks
from kernel_builder.build_summary import FailedVariant
from kernel_builder.checks import CheckedPackage, CheckReport, ProbeProcess, summary
from kernel_builder.checks.torch_build import may_load
from kernel_builder.config.variant import this_platform
from kernel_builder.package import foreign_files, records
from kernel_builder.package.assembly import assemble
from kernel_builder.package.load_conditions import load_conditions
from kernel_builder.package.swap import publish, staging
from kernel_builder.plural import counted
from kernel_builder.progress import Progress
from kernel_builder.project_selection import BuildRequest, Selection, dependencies
from kernel_builder.steps import ninja_run
from kernel_builder.steps.cache import binary_path
from kernel_builder.steps.confinement import for_steps
from kernel_builder.steps.graph import Graph, Outcome
from kernel_builder.targets import Remade, Target, by_project, split
from kernel_format import files
from kernel_format.errors import CheckError, KernelBuilderError, PackageError
from kernel_format.tree_digest import contents, is_unchanged


def remake(
    targets: Sequence[Target],
    request: BuildRequest,
    selections: tuple[Selection, ...],
    cache: Path,
    progress: Progress,
) -> Remade:
    """Make the packages of some targets, and publish those of a project that pass their checks at once.

    Args:
        selections: All projects of the build: packages may depend on those of another one.

    Raises:
        KernelBuilderError: If the sandbox that was required cannot be had, or the cache cannot be written.
    """
    confinement = for_steps(request.sandbox, [target.planned for target in targets], progress)
    with ExitStack() as stack:
        checker = _Checker(
            request,
            progress,
            stack.enter_context(ProbeProcess(confinement=confinement)),
            stack.enter_context(ProbeProcess(str(request.cross_python))) if request.cross_python else None,
            selections,
        )
        sound, unsound = split(result for project in by_project(targets) for result in checker.sources(project))

        def start_probe() -> None:
            if request.load and any(may_load(target.planned.variant) for target in sound):
                checker.probe.start()

        outcome = ninja_run.run(
            Graph(tuple(target.planned for target in sound)),
            cache,
            jobs=request.jobs or ninja_run.default_jobs(),
            confinement=confinement,
            progress=progress,
            idle=start_probe,  # so that Torch is imported beside the last steps, and not if they fail
        )
        made, unmade = split(_made(target, outcome) for target in sound)
        if made:
            start_probe()
        packaged, refused = split(
            result for project in by_project(made) for result in _package(project, cache, checker)
        )
    return Remade(packaged, (*unsound, *unmade, *refused), outcome, confinement.described())


def _made(target: Target, outcome: Outcome) -> Target | FailedVariant:
    """Return a variant if its binary has been made."""
    errors = outcome.errors_of(target.planned.binary) if target.planned.binary else []
    return target.failed(*errors) if errors else target


def _package(targets: Sequence[Target], cache: Path, checker: _Checker) -> list[Target | FailedVariant]:
    """Assemble and check packages of one project, and publish those that pass."""
    selection = targets[0].selection
    results: list[Target | FailedVariant] = list(targets)
    try:
        with staging(selection.destination) as staged:
            results = [_assembled(target, cache, staged) for target in targets]
            assembled, unassembled = split(results)
            results = [*unassembled, *checker.packages(assembled, staged)]
            passed, _ = split(results)
            names = [target.name for target in passed]
            for path in [path for path in staged.iterdir() if path.name not in names]:
                # A package that is loaded without a sandbox can also write beside itself.
                files.remove_tree(path)
            if passed:
                foreign_files.check_replaced(selection.destination, names)  # what is there may be new
                every = not (checker.request.variants or checker.request.backends)
                publish(staged, selection.destination, replace_all=selection.outdated() if every else [])
    except KernelBuilderError as error:
        return [result.failed(error) if isinstance(result, Target) else result for result in results]
    for target in passed:
        assert target.record
        records.write(target.planned, target.record, cache)
    return results


def _assembled(target: Target, cache: Path, staged: Path) -> Target | FailedVariant:
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

    def sources(self, targets: Sequence[Target]) -> list[Target | FailedVariant]:
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

    def _in_python(self, target: Target | None) -> Sequence[checks.Finding]:
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

    def _in_registrations(self, target: Target) -> Sequence[checks.Finding]:
        """Return how sources register ops as Torch does not accept them."""
        if not self.request.load or "ops" in self.request.allow:
            return ()
        return checks.check_op_sources(target.selection.project, target.planned.variant, self.probe)

    def packages(self, targets: Sequence[Target], staged: Path) -> list[Target | FailedVariant]:
        """Run all checks on the staged packages of a project."""
        if not targets:
            return []
        selection, project = targets[0].selection, targets[0].selection.project
        paths = [staged / target.name for target in targets]
        before = [contents(path) for path in paths]
        others = {repo_id: other.packages() for repo_id, other in dependencies(selection, self.selections).items()}
        checked = checks.run_all(
            paths,
            load=self.request.load,
            allow=self.request.allow,
            project=project,
            loaders=checks.Loaders(self.probe, self.cross_probe, others),
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

    def _record(self, target: Target, tree: str, report: CheckReport) -> records.CheckRecord:
        # Whether the Hub's cache has the other kernels that a package needs is not among the conditions.
        needs_others = report.package.metadata and report.package.metadata.kernel_depends
        conditions = None if needs_others else load_conditions(self.request.cross_python)
        sandbox = self.probe.confinement.described()
        if target.planned.variant.platform not in (None, this_platform()):
            sandbox["load"] = None  # the Python of another platform runs without one
        return records.CheckRecord(tree, report.passed, report.skipped, conditions, sandbox)


def _changed(target: Target) -> PackageError:
    return PackageError(
        f"the files of {target.name} changed while it was checked",
        where=str(target.selection.project.root),
        hint="its Python must not write into its own directory when it is imported",
    )


def _passing(targets: Sequence[Target], reports: Sequence[CheckReport]) -> list[Target | FailedVariant]:
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
