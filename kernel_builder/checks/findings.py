"""The input and the output of checks: a package, findings and a report."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from kernel_builder import backends, elf
from kernel_builder.backends import CompiledBackend
from kernel_builder.config.project import Project
from kernel_builder.config.variant import Release, TvmFfiAbi, Variant
from kernel_builder.elf import SharedObject
from kernel_format.metadata import PackageMetadata

_SHARED_OBJECT = re.compile(r"\.so(\.\d+)*$")
# The oldest C and C++ runtimes that a package must load with, and the oldest Python of the public client and of Torch.
OLDEST_MANYLINUX = "manylinux_2_28"
OLDEST_PYTHON = Release(3, 10)


class NotApplicable(Exception):
    """Raised by a check that does not apply to this package. The message is the reason in the report."""


@dataclass(frozen=True)
class Finding:
    """One problem with one file, and its repair.

    Attributes:
        severity: Only errors make a check fail.
        path: The file, relative to the package, with `/`.
        check: The name of the check; empty until the check has ended.
    """

    message: str
    hint: str
    severity: Literal["error", "warning"] = "error"
    path: str = ""
    check: str = ""


@dataclass(frozen=True)
class CheckedPackage:
    """A `build/<variant>/` directory to check.

    Attributes:
        variant: None if the directory's name is not a variant's.
        metadata: None if `metadata.json` is missing or invalid.
        load_answers: Returns the answers of `load.start_loading` for all packages of the command; None before the load.
        project: The project that it was built from, if that is here.
    """

    directory: Path
    variant: Variant | None
    metadata: PackageMetadata | None
    load_answers: Callable[[], Mapping[str, Mapping[str, Any]]] | None = None
    project: Project | None = None

    @property
    def is_on_tvm_ffi(self) -> bool:
        """Whether the variant is for TVM FFI, and not for Torch."""
        return self.variant is not None and isinstance(self.variant.framework, TvmFfiAbi)

    @cached_property
    def binaries(self) -> tuple[SharedObject, ...]:
        """The shared objects at the top of the package.

        Raises:
            NotApplicable: If there is none, or one is not an ELF shared object, which the check `binary` reports.
        """
        if not self.binary_paths:
            raise NotApplicable("the package has no binary")
        try:
            return tuple(elf.read(path) for path in self.binary_paths)
        except elf.Unreadable as error:
            raise NotApplicable(str(error)) from error

    @property
    def binary_paths(self) -> list[Path]:
        """The files at the top of the package whose names end like a shared object's, sorted."""
        return sorted(path for path in self.directory.iterdir() if _SHARED_OBJECT.search(path.name) and path.is_file())

    @property
    def known_metadata(self) -> PackageMetadata:
        """`metadata`, for checks that need it.

        Raises:
            NotApplicable: If there is none, which the check `layout` reports.
        """
        if self.metadata is None:
            raise NotApplicable("metadata.json is missing, is not a JSON object, or has invalid `kernel-depends`")
        return self.metadata

    def in_project(self, finding: Finding) -> Finding:
        """Name the project's file instead of its copy in the package, which may be in a temporary directory."""
        if self.project is None:
            return finding
        own = {name: str(path.relative_to(self.project.root)) for name, path in self.project.python_files}
        message = finding.message
        for name, path in own.items():
            message = message.replace(f"{self.directory}/{name}", path)
        # Files of the builder are in the package only.
        message = message.replace(f"{self.directory}/", f"build/{self.directory.name}/")
        return replace(finding, path=own.get(finding.path, finding.path), message=message)

    @property
    def backends(self) -> tuple[CompiledBackend, ...]:
        """The back end of the package; if its variant is unknown, all."""
        return tuple(backend for backend in backends.every() if self.variant is None or backend is self.variant.backend)


@dataclass(frozen=True)
class CheckReport:
    """The result of all checks of one package.

    Attributes:
        skipped: The reason for each check that does not apply.
        allowed: The checks whose errors count as warnings here, because the user allows them.
    """

    package: CheckedPackage
    passed: tuple[str, ...]
    skipped: Mapping[str, str]
    findings: tuple[Finding, ...]
    allowed: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether there are no findings but warnings."""
        return not any(finding.severity == "error" for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """The report as `--json` prints it."""
        return {
            "variant": self.package.directory.name,
            "directory": str(self.package.directory),
            "ok": self.ok,
            "passed": list(self.passed),
            "skipped": dict(self.skipped),
            "allowed": list(self.allowed),
            "findings": [asdict(finding) for finding in self.findings],
        }


_MOST = 20
# From this number on, variants are counted and not named.
_MANY_VARIANTS = 3


def summary_lines(reports: Mapping[str, CheckReport], severity: str, rest: str) -> list[str]:
    """Return the findings of one severity as text, each with its hint.

    Args:
        reports: By variant.
        rest: The place of the findings for which there are no lines, for example "`--json` lists all".
    """
    variants: dict[Finding, list[str]] = {}
    for name, report in reports.items():
        for finding in dict.fromkeys(report.findings):
            if finding.severity == severity:
                variants.setdefault(finding, []).append(name)
    text = []
    for finding, names in list(variants.items())[:_MOST]:
        served = f"{'all ' if len(names) == len(reports) else ''}{len(names)} variants"
        served = " and ".join(names) if len(names) < _MANY_VARIANTS else served
        text.append(f"{finding.path}: {finding.message}, in {served} [{finding.check}]")
        text.append(f"    {finding.hint}")
    if len(variants) > _MOST:
        text.append(f"... and {len(variants) - _MOST} more; {rest}")
    return text
