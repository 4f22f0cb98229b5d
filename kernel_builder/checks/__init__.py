"""Questions to a package, answered with findings that name a file and say what to do.

    report = checks.run(Path("kernels/rmsnorm/build/torch-stable-abi210-cpu-x86_64-linux"))

A check is a function from a package to findings, and lives in a file of its own; what it compares with is data.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kernel_builder.checks import (
    binary,
    dependencies,
    digest,
    layout,
    load,
    manylinux,
    op_namespace,
    python_abi,
    python_imports,
    python_source,
    run_path,
    torch_stable_abi,
    undefined,
)
from kernel_builder.checks.findings import AbiPolicy, Finding, NotApplicable, Package, Report
from kernel_builder.config.variant import Variant
from kernel_builder.errors import VariantError

__all__ = ["ABI_CHECKS", "CHECKS", "AbiPolicy", "Finding", "Package", "Report", "read", "run"]

CHECKS: Mapping[str, Callable[[Package], Iterable[Finding]]] = {
    "layout": layout.check,
    "digest": digest.check,
    "python-source": python_source.check,
    "python-imports": python_imports.check,
    "op-namespace": op_namespace.check,
    "binary": binary.check,
    "manylinux": manylinux.check,
    "python-abi": python_abi.check,
    "torch-stable-abi": torch_stable_abi.check,
    "undefined": undefined.check,
    "dependencies": dependencies.check,
    "run-path": run_path.check,
    "load": load.check,
}
ABI_CHECKS = ("binary", "manylinux", "python-abi", "torch-stable-abi", "undefined", "dependencies", "run-path")


def read(directory: Path, policy: AbiPolicy | None = None) -> Package:
    """The package in `directory`, whatever state it is in; what is missing or wrong is for the checks to say."""
    try:
        variant = Variant.parse(directory.name)
    except VariantError:
        variant = None
    return Package(directory, variant, _metadata(directory / "metadata.json"), policy or AbiPolicy())


def run(
    package_dir: Path,
    *,
    only: Sequence[str] | None = None,
    load: bool = True,
    policy: AbiPolicy | None = None,
) -> Report:
    """Ask all checks, or those named in `only`, about the package in `package_dir`.

    `load=False` leaves out the check that imports the package, which takes seconds where the others take milliseconds.
    """
    package = read(package_dir.resolve(), policy)
    passed: list[str] = []
    skipped: dict[str, str] = {}
    findings: list[Finding] = []
    for name in CHECKS if only is None else only:
        if name == "load" and not load:
            continue
        try:
            found = list(CHECKS[name](package))
        except NotApplicable as reason:
            skipped[name] = str(reason)
            continue
        findings += found
        if not found:
            passed.append(name)
    return Report(package, tuple(passed), skipped, tuple(findings))


def _metadata(path: Path) -> Mapping[str, Any] | None:
    try:
        metadata = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return metadata if isinstance(metadata, dict) else None
