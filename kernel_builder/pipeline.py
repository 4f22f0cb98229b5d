"""From project directories to packages: read, select, plan, and remake what is not current.

A build that changes nothing imports no module that only a compile, a check or a report needs: those imports took a
fifth of its time.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kernel_builder.build_summary import BuildSummary, BuiltPackage
from kernel_builder.cache_directory import is_open_to_others
from kernel_builder.config import offered
from kernel_builder.config.notices import notices
from kernel_builder.plural import counted
from kernel_builder.progress import Progress, Silent
from kernel_builder.project_selection import BuildRequest, select
from kernel_builder.steps.graph import Graph
from kernel_builder.targets import Remade, Target, is_current, plan_targets, split
from kernel_format import files
from kernel_format.errors import StoreError

if TYPE_CHECKING:
    from kernel_builder.steps.resources import SourceResources
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
    if request.allow:
        from kernel_builder.checks import require_allowable

        require_allowable(request.allow)
    selected = select(request, toolchains)
    told = notices([selection.project for selection in selected.selections])
    for notice in told:
        progress.say(f"warning: {notice}")
    if is_open_to_others(cache):
        progress.say(f"warning: others can write to the cache {cache}, and so into what is built")
    with ExitStack() as stack:
        for destination in sorted(selection.destination for selection in selected.selections):
            stack.enter_context(_locked(destination, cache, progress))
        targets, unplanned = split(
            result for selection in selected.selections for result in plan_targets(selection, request, toolchains)
        )
        graph = Graph(tuple(target.planned for target in targets))
        progress.say(f"{counted(len(graph.variants), 'variant')}, {counted(len(graph.binaries), 'binary')}")
        stale = [target for target in targets if not is_current(target.record, request)]
        remade = Remade()
        if stale or request.sandbox == "require":
            from kernel_builder.remake import remake

            remade = remake(stale, request, selected.selections, cache, progress)
        failures = (*selected.failures, *unplanned, *remade.failures)
        failed = {(failure.project, failure.variant) for failure in failures}
        results = {target.key: target for target in (*targets, *remade.targets) if target.key not in failed}
        packages = tuple(_built(target, list(results.values())) for target in results.values())
        reported: tuple[SourceResources, ...] = ()
        if request.resources:
            from kernel_builder.steps import confinement, ninja_run, resources

            final = Graph(tuple(target.planned for target in results.values()))
            reported = resources.report(
                final,
                cache,
                jobs=request.jobs or ninja_run.default_jobs(),
                confinement=confinement.chosen(request.sandbox, next((made.cxx for made in final.binaries), None)),
                progress=progress,
            )
    skipped = {selection.name: offered.skipped_backends(selection.project) for selection in selected.selections}
    return BuildSummary(
        packages=packages,
        failures=failures,
        unavailable=selected.unavailable,
        skipped={name: tuple(map(str, backends)) for name, backends in skipped.items() if backends},
        steps=remade.outcome.steps,
        compiles=remade.outcome.compiles,
        cpu_seconds=remade.outcome.cpu_seconds,
        seconds=time.monotonic() - started,
        warnings=remade.outcome.warnings,
        notices=tuple(told),
        resources=reported,
        sandbox=remade.sandbox,
    )


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


def _built(target: Target, built: Sequence[Target]) -> BuiltPackage:
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
