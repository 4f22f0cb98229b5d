"""Notices about the projects of a command, each printed once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kernel_builder.config import offered
from kernel_builder.config.project import Project
from kernel_builder.plural import some_of

# Names of projects in one line; the others are counted.
_NAMES = 3


def of_project(project: Project) -> Iterator[str]:
    """Yield the warnings about a project's `build.toml`, and the parts that are not built."""
    yield from project.warnings
    yield from offered.empty_backends(project).values()
    for kernel in project.kernels:
        if kernel.backend not in project.backends:
            yield f"[kernel.{kernel.name}] is for {kernel.backend}, which is not in [general] backends: it is not built"
    for backend in offered.skipped_backends(project):
        reason = backend.why_not_compiled(project)
        yield f"this builder does not compile for {backend}: {reason}"


def notices(projects: Sequence[Project]) -> list[str]:
    """Return one line for each notice, with the projects that it is about."""
    about: dict[str, list[str]] = {}
    for project in projects:
        for notice in of_project(project):
            about.setdefault(notice, []).append(project.name)
    return [f"{some_of(names, _NAMES)}: {notice}" for notice, names in about.items()]
