"""The values of a build graph: compile steps, binaries, planned variants, and the outcome of a run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernel_builder.backends import LinkedIfCalled
from kernel_builder.backends.host_code import Compiler, token
from kernel_builder.config.project import Project
from kernel_builder.config.variant import Variant
from kernel_format.errors import BuildError

# Increment when a change to the builder changes the output of an equal command.
RECIPE = 1

PYTHON, SYSROOT = token("python"), token("sysroot")


def digest(*parts: object) -> str:
    """Return a hexadecimal SHA-256 over values that JSON can represent."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


@dataclass(frozen=True)
class CompileStep:
    """Compiles one source to one object.

    The step runs in a directory of its own, which holds the project's files below `src/`.
    """

    key: str  # names the object in the cache
    project: Path  # the project's root, from which `files` are copied
    source: str  # the source, relative to the project
    compiler: Compiler
    argv: tuple[str, ...]  # the command without its output, with tokens
    roots: Mapping[str, Path]  # token -> directory
    files: tuple[tuple[str, str], ...]  # project-relative path -> SHA-256 of every file that the step can read
    generated: Mapping[str, str]  # path in the step's directory -> content of files that the builder adds
    # Regular expressions for the machine's headers that it may read: of the compiler and the C library.
    headers: tuple[str, ...]
    uses_namespace: bool  # the files mention the macro of the op namespace, so the command has to define it
    title: str  # the step's name in progress reports and errors


@dataclass(frozen=True)
class Binary:
    """One shared object. Several variants may be published with the same binary."""

    key: str  # names the file in the cache
    module: str  # its module name and op namespace, `_<python name>_<backend>_<unique>`
    platform: str  # the platform that it is for
    objects: tuple[CompileStep, ...]  # the compile steps whose objects are linked, in order
    cxx: Path
    argv: tuple[str, ...]  # the link command without objects and output, with tokens
    libraries: tuple[str, ...]
    linked_if_called: tuple[LinkedIfCalled, ...]  # libraries that it names as needed only if it calls them
    roots: Mapping[str, Path]  # token -> the directory it stands for
    generated: Mapping[str, str]  # path in the step's directory -> content of files that the builder adds
    title: str  # the binary's name in progress reports and errors


@dataclass(frozen=True)
class PlannedVariant:
    """One variant to publish, with all inputs of its package."""

    project: Project
    variant: Variant
    module: str  # the op namespace, a digest of the binary's inputs and the Python files
    archs: tuple[str, ...]  # the architectures that its binary has code for
    python: Mapping[str, str]  # path inside the package -> SHA-256 of the project's Python files
    provenance: Mapping[str, Any]  # builder, compiler and sources, for `metadata.json`; `plan` adds the compiler only
    sources: Mapping[str, Any]  # the digests of `recorded_sources`, which show later whether the sources have changed
    binary: Binary | None  # None for Python-only variants


@dataclass(frozen=True)
class Graph:
    """All steps of the requested projects and variants; identical steps appear once."""

    variants: tuple[PlannedVariant, ...]

    @property
    def binaries(self) -> tuple[Binary, ...]:
        """The distinct binaries."""
        return tuple({v.binary.key: v.binary for v in self.variants if v.binary}.values())

    @property
    def compiles(self) -> tuple[CompileStep, ...]:
        """The distinct compile steps."""
        return tuple({step.key: step for binary in self.binaries for step in binary.objects}.values())

    def variants_of(self, step: CompileStep | Binary) -> tuple[str, ...]:
        """Return the names of the variants that need a step."""
        return tuple(
            planned.variant.name
            for planned in self.variants
            if planned.binary
            and (planned.binary.key == step.key or any(step.key == part.key for part in planned.binary.objects))
        )


@dataclass(frozen=True)
class Outcome:
    """The result of running a graph."""

    steps: int = 0  # how many steps ran: compiles and links
    compiles: int = 0  # how many of them were compiles
    cpu_seconds: float = 0.0  # processor time of all compilers, user and system
    warnings: Mapping[str, str] = field(default_factory=dict)  # title of a successful step -> its compiler's output
    # Key of a failed step -> error. Links whose objects have failed are not included.
    failures: Mapping[str, BuildError] = field(default_factory=dict)

    def errors_of(self, binary: Binary) -> list[BuildError]:
        """Return the errors of a binary and its objects."""
        steps: list[CompileStep | Binary] = [*binary.objects, binary]
        return [self.failures[step.key] for step in steps if step.key in self.failures]
