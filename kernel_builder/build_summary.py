"""What a build did: packages, failures, and what is not built here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel_builder.steps.buildable import UnavailableVariant
from kernel_format.errors import BuildError, KernelBuilderError, SeveralErrors, StoreError

if TYPE_CHECKING:
    from kernel_builder.checks import CheckReport
    from kernel_builder.steps.resources import SourceResources


@dataclass(frozen=True)
class BuiltPackage:
    """One package of a build.

    Attributes:
        project: Its name; where several projects of the build have it, with the directory.
        status: `built`, or `unchanged` if the package was there already.
        shares: The other variants of this build with the same binary.
        size: Bytes of all files.
        passed: The checks that passed, in this build or in the earlier one that made the package.
        skipped: Check -> why it did not run.
        sandbox: What the `steps` and the `load` check of the build that made the package ran in; None for no sandbox.
            A step whose output the cache has does not run.
        report: The result of the checks; None if unchanged, since an earlier build checked the same bytes.
    """

    project: str
    variant: str
    path: Path
    module: str
    status: str
    shares: tuple[str, ...]
    size: int
    passed: tuple[str, ...]
    skipped: Mapping[str, str]
    sandbox: Mapping[str, str | None]
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
            "passed-checks": list(self.passed),
            "skipped-checks": dict(self.skipped),
            "sandbox": dict(self.sandbox),
            "checks": self.report.as_dict() if self.report else None,
        }


@dataclass(frozen=True)
class FailedVariant:
    """A variant that was asked for and not built.

    Attributes:
        project: The project's name, or its directory if `build.toml` cannot be read.
        variant: None if the project as a whole failed.
        errors: Why; equal errors of several variants are one failure.
        report: The result of the checks, if they failed.
        outdated: The package of an earlier build is still there.

    Raises:
        StoreError: If an error is one: a full disk or a cache that cannot be written stops the whole build.
    """

    project: str
    variant: str | None
    errors: tuple[KernelBuilderError, ...]
    report: CheckReport | None = None
    outdated: bool = False

    def __post_init__(self) -> None:
        for error in self.errors:
            if isinstance(error, StoreError):
                raise error

    def as_dict(self) -> dict[str, Any]:
        """Return the failure as `--json` prints it."""
        return {
            "project": self.project,
            "variant": self.variant,
            "errors": [error.as_dict() for error in self.errors],
            "checks": self.report.as_dict() if self.report else None,
            "outdated": self.outdated,
        }


@dataclass(frozen=True)
class BuildSummary:
    """What a build did.

    Attributes:
        unavailable: Variants that this machine cannot build; without a name if that is all of a project's.
        skipped: Project name -> backends that are valid but not built here.
        steps: How many steps ran.
        compiles: How many of them were compiles.
        cpu_seconds: Processor time of the compilers.
        seconds: Wall time of the whole build.
        warnings: Title of a step -> what its compiler printed.
        sandbox: What this build's `steps` and `load` checks ran in; None for no sandbox, or if nothing ran.
        resources: What each kernel takes of the GPU, if that was asked for.
        notices: What the projects' authors should know: warnings about `build.toml`, and what is not built.
    """

    packages: tuple[BuiltPackage, ...]
    failures: tuple[FailedVariant, ...]
    unavailable: tuple[UnavailableVariant, ...]
    skipped: Mapping[str, tuple[str, ...]]
    steps: int
    compiles: int
    cpu_seconds: float
    seconds: float
    warnings: Mapping[str, str] = field(default_factory=dict)
    notices: tuple[str, ...] = ()
    resources: tuple[SourceResources, ...] = ()
    sandbox: Mapping[str, str | None] = field(default_factory=dict)

    @property
    def errors(self) -> tuple[KernelBuilderError, ...]:
        """The distinct errors of all failures. A source that fails alike for several variants is one error."""
        distinct: dict[object, KernelBuilderError] = {}
        for error in (error for failed in self.failures for error in failed.errors):
            output = error.output if isinstance(error, BuildError) else ""
            same = (error.where, output) if output else tuple(error.as_dict().values())
            distinct.setdefault(same, error)
        return tuple(distinct.values())

    @property
    def error(self) -> KernelBuilderError | None:
        """The only error, or one that stands for several; None if nothing failed."""
        if len(self.errors) < 2:
            return next(iter(self.errors), None)
        return SeveralErrors(self.errors)

    def raise_error(self) -> None:
        """Raise the error, for callers to whom a part of the packages is of no use."""
        if self.error:
            raise self.error

    def as_dict(self) -> dict[str, Any]:
        """Return the summary as `--json` prints it; after a failure, with the keys of an error."""
        return {
            **(self.error.as_dict() if self.error else {}),
            "packages": [built.as_dict() for built in self.packages],
            "failures": [failed.as_dict() for failed in self.failures],
            "unavailable": [asdict(variant) for variant in self.unavailable],
            "skipped-backends": {name: list(backends) for name, backends in self.skipped.items()},
            "steps": self.steps,
            "compiles": self.compiles,
            "cpu-seconds": round(self.cpu_seconds, 2),
            "seconds": round(self.seconds, 3),
            "warnings": dict(self.warnings),
            "notices": list(self.notices),
            "resources": [source.as_dict() for source in self.resources],
            "sandbox": dict(self.sandbox),
        }
