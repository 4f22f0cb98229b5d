"""The record of a package's sources, and the project's differences from it.

With it, a machine without compilers detects packages of older sources before they are published beside the current
ones. It leaves out Python files, which the package contains.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kernel_builder.config import aot_toml
from kernel_builder.config.build_toml import FILE
from kernel_builder.config.project import Project
from kernel_builder.steps.graph import CompileStep
from kernel_format import metadata
from kernel_format.files import file_digest
from kernel_format.tree_digest import SIGNATURE

FILES = "files"


def record(project: Project, steps: Iterable[CompileStep]) -> dict[str, Any]:
    """Return the digests of `build.toml`, and of the files that a variant is compiled from."""
    files = {FILE: file_digest(project.root / FILE), **dict(file for step in steps for file in step.files)}
    return {FILES: dict(sorted(files.items()))}


def record_ahead_of_time(project: Project) -> dict[str, Any]:
    """Return the digests of the files that the compiled form of a Python-only project is made of."""
    names = [FILE, aot_toml.FILE, *(str(path.relative_to(project.root)) for _, path in project.python_files)]
    return {FILES: {name: file_digest(project.root / name) for name in sorted(names)}}


def differences(project: Project, recorded: Mapping[str, Any], package: Path) -> Iterator[str]:
    """Yield the differences of a project from the sources of a package, one line for each file.

    Args:
        recorded: The result of `record`; empty for packages of other tools, whose Python files alone are compared.
    """
    files = recorded.get(FILES)
    for name, sha256 in (files if isinstance(files, dict) else {}).items():
        if not (project.root / name).is_file():
            yield f"{name} is gone"
        elif file_digest(project.root / name) != sha256:
            yield f"{name} has changed"
    if isinstance(files, dict) and aot_toml.FILE in files:  # the package has other Python files than the project
        for _, path in project.python_files:
            if (name := str(path.relative_to(project.root))) not in files:
                yield f"{name} is new"
        return
    own = {name for name, _ in project.python_files}
    for name, path in project.python_files:
        if not (package / name).is_file():
            yield f"{path.relative_to(project.root)} is new"
        elif (package / name).read_bytes() != path.read_bytes():
            yield f"{path.relative_to(project.root)} has changed"
    if recorded:
        compatibility = project.python_name
        written = {"_ops.py", f"{compatibility}/__init__.py", metadata.NAME, SIGNATURE}
        for path in sorted(
            path for path in package.rglob("*") if path.is_file() and path.suffix not in (".so", ".pyc")
        ):
            if (name := path.relative_to(package).as_posix()) not in own | written:
                yield f"{project.framework.package_directory}/{compatibility}/{name} is gone"
