"""What a build is to make: its variants, planned, with what is known of the packages in their places."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kernel_builder.build_summary import FailedVariant
from kernel_builder.package import records
from kernel_builder.package.load_conditions import load_conditions
from kernel_builder.project_selection import BuildRequest, Selection
from kernel_builder.steps import provenance, recorded_sources
from kernel_builder.steps.graph import Outcome, PlannedVariant
from kernel_builder.steps.plan import plan
from kernel_format.errors import FetchError, KernelBuilderError

if TYPE_CHECKING:
    from kernel_builder.checks import CheckReport
    from kernel_builder.toolchain import Toolchains


@dataclass(frozen=True)
class Target:
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


class Remade(NamedTuple):
    """What `remake` made of the targets that were not current; by default, nothing.

    Attributes:
        sandbox: What the `steps` and the `load` check ran in; None for no sandbox, or if nothing ran.
    """

    targets: Sequence[Target] = ()
    failures: Sequence[FailedVariant] = ()
    outcome: Outcome = Outcome()
    sandbox: Mapping[str, str | None] = {"steps": None, "load": None}


def split(results: Iterable[Target | FailedVariant]) -> tuple[list[Target], list[FailedVariant]]:
    """Return the variants to go on with, and the others."""
    listed = list(results)
    failures = [result for result in listed if isinstance(result, FailedVariant)]
    return [result for result in listed if isinstance(result, Target)], failures


def by_project(targets: Iterable[Target]) -> list[list[Target]]:
    """Return the targets of each project."""
    return [list(group) for _, group in groupby(targets, key=lambda target: target.selection.name)]


def plan_targets(
    selection: Selection, request: BuildRequest, toolchains: Toolchains
) -> Iterator[Target | FailedVariant]:
    """Plan the variants of a project."""
    plans: list[PlannedVariant] = []
    failures: list[FailedVariant] = []
    unfetched: dict[tuple[object, object], FetchError] = {}
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
        yield Target(selection, complete, records.read(complete, path, toolchains.cache))
    yield from failures


def is_current(record: records.CheckRecord | None, request: BuildRequest) -> bool:
    """Return whether a package is what its inputs give and has passed its checks.

    A check that was skipped has not passed: it runs as soon as the machine may allow it.
    """
    if record is None or not request.load or "load" in record.passed:
        return record is not None
    return record.skipped.get("load") != records.NO_LOAD and record.conditions == load_conditions(request.cross_python)
