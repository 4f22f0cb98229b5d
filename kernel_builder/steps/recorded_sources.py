"""The record of a package's sources, and the project's differences from it.

With it, a machine without compilers detects packages of older sources before they are published beside the current
ones. It leaves out Python files, which the package contains.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kernel_builder.config import kernel_sources
from kernel_builder.config.project import Project, TorchNoarch
from kernel_builder.config.variant import Variant
from kernel_builder.steps.graph import CompileStep, digest

SETTINGS, FILES = "settings", "files"


def record(project: Project, variant: Variant, steps: Iterable[CompileStep]) -> dict[str, Any]:
    """Return the digests of the settings of `build.toml` and of the files that a variant is compiled from."""
    return {SETTINGS: _settings(project, variant), FILES: dict(sorted({f for step in steps for f in step.files}))}


def differences(project: Project, variant: Variant, recorded: Mapping[str, Any], package: Path) -> Iterator[str]:
    """Yield the differences of a project from the sources of a package, one line for each file.

    Args:
        recorded: The result of `record`; empty for packages of other tools, whose Python files alone are compared.
    """
    if recorded.get(SETTINGS, settings := _settings(project, variant)) != settings:
        yield f"the settings of its {variant.backend} variants in build.toml have changed"
    files = recorded.get(FILES)
    for name, sha256 in (files if isinstance(files, dict) else {}).items():
        if not (project.root / name).is_file():
            yield f"{name} is gone"
        elif hashlib.sha256((project.root / name).read_bytes()).hexdigest() != sha256:
            yield f"{name} has changed"
    own = {name for name, _ in project.python_files}
    for name, path in project.python_files:
        if not (package / name).is_file():
            yield f"{path.relative_to(project.root)} is new"
        elif (package / name).read_bytes() != path.read_bytes():
            yield f"{path.relative_to(project.root)} has changed"
    if recorded:
        compatibility = project.python_name
        for path in sorted(package.rglob("*.py")):
            name = path.relative_to(package).as_posix()
            if name not in own and name not in ("_ops.py", f"{compatibility}/__init__.py"):
                yield f"{project.framework.package_directory}/{compatibility}/{name} is gone"


def _settings(project: Project, variant: Variant) -> str:
    """Return a digest of the settings in `build.toml` for a variant that are not in the metadata."""
    framework, backend = project.framework, variant.backend
    settings: dict[str, Any] = {
        "python-depends": [project.python_depends, project.backend_python_depends.get(backend)],
        "kernel-depends": [
            [asdict(depend) for depend in depends]
            for depends in (project.kernel_depends, project.backend_kernel_depends.get(backend, ()))
        ],
    }
    if isinstance(framework, TorchNoarch):
        settings["capabilities"] = backend.noarch_archs(framework)
    else:
        settings[framework.table] = [
            framework.src,
            framework.include,
            framework.cxx_flags,
            framework.stable_abi.get(backend),
        ]
        kernels = kernel_sources.of_backend(project, backend, variant.release)
        # A build with --capability is not published at all.
        settings["kernels"] = [
            {**vars(kernel), "backend": kernel.backend.name, "only_capabilities": None} for kernel in kernels
        ]
        for recorded in settings["kernels"]:
            if recorded["cargo_manifest"] is None:  # packages of older releases have no such key
                del recorded["cargo_manifest"]
    return digest(settings)
