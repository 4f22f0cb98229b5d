"""The result of a build: packages, failures, and variants that this machine cannot build."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernel_builder.checks.findings import CheckReport
from kernel_builder.json_value import by_field
from kernel_builder.steps.buildable import UnavailableVariant
from kernel_format.errors import BuildError, KernelBuilderError, SeveralErrors


@dataclass(frozen=True)
class BuiltPackage:
    """One package of a build."""

    project: str  # the project's name; if several projects of the build have the same name, with the directory
    variant: str
    path: Path
    module: str
    status: str  # `built`, or `unchanged` if the package existed
    shares_binary_with: tuple[str, ...]  # the other variants of this build with the same binary
    bytes: int  # of all files
    passed_checks: tuple[str, ...]  # the checks that passed, in this build or in the earlier one that built the package
    skipped_checks: Mapping[str, str]  # skipped check -> reason
    sandbox: str | None  # of the build that built and loaded the package; None for no sandbox
    checks: CheckReport | None  # the results; None for an unchanged package, which an earlier build checked


@dataclass(frozen=True)
class FailedVariant:
    """A requested variant that could not be built."""

    project: str  # the project's name, or its directory if `build.toml` cannot be read
    variant: str | None  # none if the project as a whole failed
    errors: tuple[KernelBuilderError, ...]  # the reasons; variants that fail alike have equal errors
    checks: CheckReport | None = None  # the results, if checks failed
    outdated: bool = False  # whether the destination has the package of an earlier build


@dataclass(frozen=True)
class BuildSummary:
    """The result of a build."""

    packages: tuple[BuiltPackage, ...]
    failures: tuple[FailedVariant, ...]
    # Variants that this machine cannot build; an empty variant name stands for the whole project.
    unavailable: tuple[UnavailableVariant, ...]
    skipped_backends: Mapping[str, tuple[str, ...]]  # project name -> backends that are not compiled for
    steps: int  # number of steps that ran
    compiles: int  # number of compile steps among them
    cpu_seconds: float  # processor time of the compilers
    seconds: float  # wall time of the whole build
    warnings: Mapping[str, str] = field(default_factory=dict)  # title of a step -> output of its compiler
    notices: tuple[str, ...] = ()  # warnings about `build.toml`, and parts of it that are not built
    sandbox: str | None = None  # of this build's compilers and loaded packages; None for no sandbox, or if nothing ran

    @property
    def errors(self) -> tuple[KernelBuilderError, ...]:
        """The distinct errors of all failures. A source that fails alike for several variants counts once."""
        distinct: dict[object, KernelBuilderError] = {}
        for error in (error for failed in self.failures for error in failed.errors):
            output = error.output if isinstance(error, BuildError) else ""
            same = (error.where, output) if output else tuple(error.as_dict().values())
            distinct.setdefault(same, error)
        return tuple(distinct.values())

    @property
    def error(self) -> KernelBuilderError | None:
        """The error, or a `SeveralErrors`; None if nothing failed."""
        if len(self.errors) < 2:
            return next(iter(self.errors), None)
        return SeveralErrors(self.errors)

    def raise_error(self) -> None:
        """Raise the error, for callers that need all packages."""
        if self.error:
            raise self.error

    def as_dict(self) -> dict[str, Any]:
        """Return the summary as `--json` prints it; after a failure, with the keys of an error."""
        return {**(self.error.as_dict() if self.error else {}), **by_field(self)}
