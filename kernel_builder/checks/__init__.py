"""Check built packages; every finding names a file and the repair.

    reports = checks.run_all([Path("kernels/rmsnorm/build/torch-stable-abi210-cpu-x86_64-linux")])

A check is a function from a package, or from a package and one of its binaries, to findings. Its reference is data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from kernel_builder.checks import binaries, layout, ops, python_rules, symbols
from kernel_builder.checks.findings import CheckedPackage, CheckReport, Finding, NotApplicable
from kernel_builder.checks.load import ProbeProcess, check_load, start_loading
from kernel_builder.config.project import Project
from kernel_builder.config.variant import Variant
from kernel_builder.elf import SharedObject
from kernel_builder.package.records import NO_LOAD
from kernel_builder.progress import Progress
from kernel_builder.steps.confinement import SandboxMode, chosen
from kernel_format.errors import ConfigError
from kernel_format.metadata import PackageMetadata

Check = Callable[[CheckedPackage], Iterable[Finding]]


def _of_binaries(check: Callable[[CheckedPackage, SharedObject], Iterable[Finding]]) -> Check:
    """Return the check of all binaries of a package."""

    def check_binaries(package: CheckedPackage) -> Iterator[Finding]:
        for binary in package.binaries:
            for finding in check(package, binary):
                yield replace(finding, path=binary.name)

    return check_binaries


CHECKS: Mapping[str, Check] = {
    "layout": layout.check_layout,
    "digest": layout.check_digest,
    "python-source": python_rules.check_python_source,
    "python-imports": python_rules.check_python_imports,
    "op-namespace": python_rules.check_op_namespace,
    "binary": binaries.check_file,
    "manylinux": _of_binaries(binaries.check_manylinux),
    "python-abi": _of_binaries(binaries.check_python_abi),
    "torch-stable-abi": _of_binaries(symbols.check_torch_stable_abi),
    "undefined": _of_binaries(symbols.check_undefined),
    "dependencies": _of_binaries(binaries.check_dependencies),
    "run-path": _of_binaries(binaries.check_run_path),
    "process-end": _of_binaries(binaries.check_process_end),
    "device-code": _of_binaries(binaries.check_device_code),
    "load": check_load,
    "ops": ops.check_ops,
}

# The checks that need a process with Torch.
_LOADING = frozenset({"load", "ops"})

# Without these, a package may not load, or differ from its metadata, so their findings cannot be allowed.
_REQUIRED = frozenset({"layout", "digest", "binary", "load"})
ALLOWABLE = tuple(name for name in CHECKS if name not in _REQUIRED)


def require_allowable(names: Sequence[str]) -> None:
    """Raise a ConfigError for a name that is not a check whose findings can be allowed."""
    for name in names:
        if name not in ALLOWABLE:
            raise ConfigError(
                "the package would not load, or would differ from its metadata, so this check cannot be allowed"
                if name in CHECKS
                else "there is no such check",
                where=f"--allow {name}",
                hint=f"expected one of {', '.join(ALLOWABLE)}",
            )


def read(directory: Path) -> CheckedPackage:
    """Read the package in `directory`, in any state; the checks report missing and wrong files."""
    return CheckedPackage(directory, Variant.find(directory.name), PackageMetadata.read(directory))


def run_all(
    packages: Sequence[Path],
    *,
    only: Sequence[str] | None = None,
    load: bool = True,
    allow: Sequence[str] = (),
    project: Project | None = None,
    probe: ProbeProcess | None = None,
    sandbox: SandboxMode = "auto",
    progress: Progress | None = None,
    others: Mapping[str, Sequence[Path]] = MappingProxyType({}),
) -> Iterator[CheckReport]:
    """Yield the report of each package, in order. One process loads all of them.

    Args:
        packages: Directories of packages, for example all of one project.
        only: The names of the checks to run; None for all.
        load: Run the check that imports the packages.
        allow: Names in `ALLOWABLE`: the errors of these checks are reported as warnings.
        project: The project that they were built from, whose files the findings then name.
        probe: The process that loads the packages; None for a new one.
        sandbox: Whether a new process is in a sandbox: if the system has one, always, or never.
        progress: Receives a warning if there is none.
        others: Packages of kernels that these may depend on, by repository, beside those that the client finds.
    """
    directories = [package.resolve() for package in packages]
    asked = CHECKS if only is None else only
    names = [name for name in asked if load or name not in _LOADING]
    left_out = {name: NO_LOAD for name in asked if name not in names}
    loaded = directories if _LOADING.intersection(names) else []
    confinement = chosen(sandbox, None, progress) if loaded and not probe else None
    with nullcontext(probe) if probe else ProbeProcess(confinement=confinement) as process:
        load_answers = start_loading(loaded, process, others)
        for directory in directories:
            package = replace(read(directory), load_answers=load_answers, project=project)
            yield _report(package, names, frozenset(allow), left_out)


def _report(
    package: CheckedPackage, names: Sequence[str], allow: frozenset[str], left_out: Mapping[str, str]
) -> CheckReport:
    passed: list[str] = []
    skipped = dict(left_out)
    findings: list[Finding] = []
    allowed: list[str] = []
    for name in names:
        try:
            of_check = [replace(finding, check=name) for finding in CHECKS[name](package)]
        except NotApplicable as reason:
            skipped[name] = str(reason)
            continue
        except RecursionError:
            problem = "statements or expressions are nested too deeply to be checked"
            hint = "split a long chain of operators, calls or elif"
            of_check = [Finding(problem, hint, path="*.py", check=name)]
        if name in allow and any(finding.severity == "error" for finding in of_check):
            allowed.append(name)
            of_check = [replace(finding, severity="warning") for finding in of_check]
        findings += of_check
        if name not in allowed and not any(finding.severity == "error" for finding in of_check):
            passed.append(name)
    errors = {finding.check for finding in findings if finding.severity == "error"}
    if "load" in errors and (causes := errors - {"load"}):  # the failed load would only repeat them
        findings = [finding for finding in findings if finding.check != "load" or finding.severity != "error"]
        skipped["load"] = f"the package cannot be loaded; see {', '.join(sorted(causes))}"
    in_project = tuple(package.in_project(finding) for finding in findings)
    return CheckReport(package, tuple(passed), skipped, in_project, tuple(allowed))
