"""Compiles the kernels of a project with the pinned compiler, in the sandbox: variants of ops -> cubins."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kernel_aot import CompiledKernel, Language, Variant, answers, request
from kernel_builder.config import aot_toml, matrix
from kernel_builder.config.project import Project
from kernel_builder.config.variant import this_platform
from kernel_builder.steps import confinement
from kernel_builder.steps.confinement import SandboxMode
from kernel_builder.toolchain import Toolchains
from kernel_format.errors import BuildError, ToolchainError
from kernel_format.files import temporary_directory

_PLATFORM = "x86_64-linux"
# Limits of the sandboxed process, in which the author's module runs.
_SECONDS, _SECONDS_EACH = 600, 60  # at the start, and for each kernel


def compiler_component(tables: Mapping[str, Any]) -> str:
    """Return the component with the compiler of an aot.toml's language, for this Python."""
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    language = tables.get("language", "triton")
    release = tables.get(language, matrix.load().kernel_language[language]["releases"][0])
    return f"{language}-{release}-{tag}"


def compile_all(
    project: Project,
    language: Language[Any],
    variants: Sequence[Variant],
    archs: Sequence[str],
    toolchains: Toolchains,
    mode: SandboxMode,
    jobs: int | None,
) -> list[Sequence[CompiledKernel]]:
    """Return the compiled kernels of each variant, ascending by capability.

    Raises:
        ConfigError: If a kernel cannot be compiled for a capability.
        ToolchainError: If this machine cannot run the pinned compiler.
    """
    tables = aot_toml.read(project.root)
    component = compiler_component(tables)
    if this_platform() != _PLATFORM or component not in toolchains.lock:
        raise ToolchainError(
            f"{language.title} is pinned for {_PLATFORM} as {component}, and this is {this_platform()}",
            where=str(project.root / aot_toml.FILE),
            hint=f"build the binary variants on {_PLATFORM}, with a Python for which `toolchain list` has a component",
        )
    root = toolchains.component(component).root
    source = Path(tables["source"])
    package = project.python_name
    pairs = [(variant, arch) for variant in variants for arch in archs]
    with temporary_directory() as scratch:
        for name, path in project.python_files:
            copy = scratch / "src" / package / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
        (scratch / "out").mkdir()
        asked = request(language, package, source, pairs, jobs or len(os.sched_getaffinity(0)))
        (scratch / "request.json").write_text(json.dumps(asked))
        seconds = _SECONDS + _SECONDS_EACH * len(pairs)
        environment = {
            "PATH": os.environ.get("PATH", ""),
            "HOME": str(scratch),
            "TMPDIR": str(scratch),
            "TRITON_CACHE_DIR": str(scratch / "cache"),
            "TRITON_BACKENDS_IN_TREE": "1",
            # Line numbers come with the names of directories, which would differ between two builds.
            "TRITON_DISABLE_LINE_INFO": "1",
        }
        chosen = confinement.chosen(mode, toolchains.host().path)
        command = [sys.executable, "-I", "-S", str(language.programs[0]), "request.json", str(root)]
        command = chosen.around(command, scratch, [*language.programs, root])
        failed, shown = confinement.run(command, scratch, environment, seconds)
        if failed:
            raise BuildError(f"{language.title} {failed}", where=str(root), output=shown)
        kernels = list(answers(language, scratch / "out", pairs, project.root / source))
    size = len(archs)
    return [kernels[start : start + size] for start in range(0, len(kernels), size)]
