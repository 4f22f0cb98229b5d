"""Writes the compile commands of a build plan to `compile_commands.json`, for clangd and other editor tools.

Commands of g++ keep their options. Editor tools use clang, which knows few options of nvcc, and which may be older than
the builder's: a command for device code becomes one of clang with the same headers, definitions and standard.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kernel_builder.backends.host_code import GXX, token
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


# The options that decide the meaning of a source: its headers, definitions and standard.
_KEPT = re.compile(r"-D|-U|-I|-isystem|-?-std=")
# As nvcc and clang have it.
_ARCH = re.compile(r"(?:arch=compute_|--offload-arch=(?:sm_)?)(\w+)")


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

    def located(match: re.Match[str]) -> str:  # the project stands in place of the step's `src`
        return f"{match[1] or ''}{step.project}"

    argv = [
        f"-I{_TEMPLATES}" if argument == "-Ibuilder" else re.sub(r"^(-I)?src(?=/|$)", located, argument)
        for argument in with_paths(step.argv, step.roots)
    ]
    source = str(step.project / step.source)
    of_gxx = [argument for argument in argv if not _DROPPED.match(argument)]
    command = of_gxx if step.compiler is GXX else [*_of_clang(argv, step.roots), source]
    return {"directory": str(step.project), "file": source, "arguments": command}


def _of_clang(argv: Sequence[str], roots: Mapping[str, Path]) -> list[str]:
    """Return the command for device code, without the source."""
    arch = [match[1] for argument in argv if (match := _ARCH.search(argument))][-1]
    kept: list[str] = []
    rest = iter(argv)
    for argument in rest:
        option = argument.removeprefix("-Xcompiler=")
        if _KEPT.match(option):
            kept += [option, next(rest)] if option in {"-D", "-U", "-I", "-isystem"} else [option]
    if rocm := roots.get(token("rocm")):
        return ["clang++", "-x", "hip", f"--rocm-path={rocm}", "-nogpulib", f"--offload-arch={arch}", *kept]
    cuda = roots[token("cuda")]
    command = ["clang++", "-x", "cuda", f"--cuda-path={cuda}", f"--cuda-gpu-arch=sm_{arch}", *kept]
    command += ["-Wno-unknown-cuda-version", "-isystem", f"{cuda}/include/cccl"]
    return [*command, "-idirafter", f"{_TEMPLATES}/clang", "-include", "host_math.h"]
