"""Writes the compile commands of a build plan to `compile_commands.json`, for clangd and other editor tools.

Commands of g++ keep their options. Editor tools use clang, so a back end translates its own compiler's commands.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kernel_builder.config.project import Project
from kernel_builder.config.variant import Noarch, Variant
from kernel_builder.steps import crates
from kernel_builder.steps.graph import CompileStep
from kernel_builder.steps.plan import plan
from kernel_builder.steps.step_scripts import with_paths
from kernel_builder.toolchain import Toolchains
from kernel_format import files
from kernel_format.errors import ConfigError

NAME = "compile_commands.json"

_TEMPLATES = str(Path(__file__).parents[1] / "templates")

# Options that make a step's output reproducible; with them an editor tool would report wrong file names.
_DROPPED = re.compile(r"-c$|-frandom-seed=|-fmacro-prefix-map=")


def write(project: Project, variants: Sequence[Variant], toolchains: Toolchains, output: Path) -> int:
    """Write the compile commands of a project's sources, and return their number."""
    compiled = [variant for variant in variants if not isinstance(variant.framework, Noarch)]
    if not compiled:
        raise ConfigError(
            "the project is Python-only: it has no sources to compile", where=str(project.root / "build.toml")
        )
    steps: dict[str, CompileStep] = {}
    for step in plan([(project, compiled)], toolchains).compiles:
        if step.compiler is not crates.CARGO:  # editors read the crate's own Cargo.toml
            steps.setdefault(step.source, step)
    entries = [entry(step) for step in steps.values()]
    files.write_atomically(output, json.dumps(entries, indent=2) + "\n")
    return len(entries)


def entry(step: CompileStep) -> dict[str, Any]:
    """Return the entry of a step, with absolute paths."""
    argv = [_located(argument, step.project) for argument in with_paths(step.argv, step.roots)]
    source = str(step.project / step.source)
    for_editors = step.compiler.for_editors
    command = for_editors(argv, step.roots, source) if for_editors else _gxx(argv)
    return {"directory": str(step.project), "file": source, "arguments": command}


def _located(argument: str, project: Path) -> str:
    """Return an argument with the project in place of the step's `src`, and the builder's headers for `builder`."""
    located = re.sub(r"^(-I)?src(?=/|$)", lambda match: f"{match[1] or ''}{project}", argument)
    return f"-I{_TEMPLATES}" if located == "-Ibuilder" else located


def _gxx(argv: Sequence[str]) -> list[str]:
    return [argument for argument in argv if not _DROPPED.match(argument)]
