"""Makes an ordinary kernel project of a Python-only project with an aot.toml: C++ with the cubins, and ops in Python.

The generated project lies in the builder's cache under a digest of everything that determines it, until no build has
used it for a month. It has the public format, so that any builder of it can build it. The pinned compiler makes the
cubins, in the sandbox.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomlkit

import kernel_aot
from kernel_aot import (
    CompiledKernel,
    Language,
    Variant,
    answers,
    arch_number,
    read_ops,
    request,
    select_language,
    sources,
    variants,
)
from kernel_builder import toml_file
from kernel_builder.backends import CompiledBackend
from kernel_builder.config import aot_toml, build_toml, editions, matrix, offered
from kernel_builder.config.project import Backend, Project
from kernel_builder.config.project_files import read_project
from kernel_builder.config.toml_schema import TomlPlace
from kernel_builder.config.variant import this_platform
from kernel_builder.progress import Progress
from kernel_builder.steps import confinement
from kernel_builder.steps.cache import KEEP_SECONDS
from kernel_builder.steps.confinement import SandboxMode
from kernel_builder.toolchain import Toolchains
from kernel_builder.toolchain.store import Store
from kernel_format.errors import BuildError, ToolchainError
from kernel_format.files import file_digest, temporary_directory, write_files
from kernel_format.untrusted_paths import checked_tree

_PLATFORM = "x86_64-linux"
# Limits of the sandboxed process, in which the author's module runs.
_SECONDS, _SECONDS_EACH = 600, 60  # at the start, and for each kernel
# The code that determines the generated project.
_CODE = (Path(__file__).parent, Path(kernel_aot.__file__).parent)


def generate(
    project: Project, backend: Backend, toolchains: Toolchains, mode: SandboxMode, jobs: int | None = None
) -> Project:
    """Return the project that the binary packages of a project for CUDA or ROCm are built of.

    Args:
        mode: Whether the compiler runs in a sandbox; see `confinement`.
        jobs: The number of processes that compile; None for all processors.

    Raises:
        ConfigError: If aot.toml does not fit the kernels, or a kernel does not compile.
        FetchError, StoreError, ToolchainError: If the compiler cannot be fetched, stored or run.
    """
    tables = aot_toml.read(project.root)
    language = select_language(tables)
    ops = read_ops(project.root, tables)
    archs = _archs(project, backend)
    name = _digest(project, archs, toolchains, compiler_component(tables))

    def fill(directory: Path) -> None:
        listed = [variant for op in ops for variant in variants(op)]
        kernels = _compile(project, language, listed, archs, toolchains, mode, jobs)
        python = {name: path.read_bytes() for name, path in project.python_files}
        if language.left_out:
            python = {name: text for name, text in python.items() if not language.left_out.search(text.decode())}
        write_files(directory / "torch-ext" / project.python_name, python)
        files = sources(project.root, tables, project.name, ops, kernels)
        code = [name for name in files if name.startswith("aot/")]
        files[build_toml.FILE] = _build_toml(project, code, backend.name, archs)
        checked_tree(files)  # names in aot.toml are parts of the paths, and this process is not confined
        write_files(directory, files)
        if name != _digest(project, archs, toolchains, compiler_component(tables)):
            raise BuildError("files changed while they were compiled", where=str(project.root), hint="build again")

    store = Store(toolchains.cache / "generated", Progress())
    root = store.obtain(
        name, f"kernels of {project.name} compiled by {language.title}", lambda _, directory: fill(directory)
    )
    os.utime(root.parent)
    store.clear(before=time.time() - KEEP_SECONDS)
    made = read_project(root)
    return replace(made, hub_repo_id=project.hub_repo_id, renamed=project.renamed)


def write(generated: Project, directory: Path) -> None:
    """Copy a generated project for the author to read."""
    shutil.copytree(generated.root, directory, dirs_exist_ok=True)
    for path in (directory, *directory.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def compiler_component(tables: Mapping[str, Any]) -> str:
    """Return the component with the compiler of an aot.toml's language, for this Python."""
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    language = tables.get("language", "triton")
    release = tables.get(language, matrix.load().kernel_language[language]["releases"][0])
    return f"{language}-{release}-{tag}"


def _compile(
    project: Project,
    language: Language[Any],
    variants: Sequence[Variant],
    archs: Sequence[str],
    toolchains: Toolchains,
    mode: SandboxMode,
    jobs: int | None,
) -> list[Sequence[CompiledKernel]]:
    """Compile the variants of ops with the pinned compiler, in the sandbox; return the kernels of each by capability.

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
        write_files(scratch / "src" / package, {name: path.read_bytes() for name, path in project.python_files})
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


def _archs(project: Project, backend: Backend) -> list[str]:
    """Return the architectures that one of the releases of the project's packages has, ascending."""
    assert project.ahead_of_time is not None
    kernels = [kernel for kernel in project.ahead_of_time.kernels if kernel.backend is backend]
    releases = {each.release for each in offered.variants(project.ahead_of_time) if each.backend is backend}
    assert isinstance(backend, CompiledBackend)
    every = {arch for release in releases for arch in backend.archs(kernels, release, this_platform())}
    return sorted(every, key=arch_number)


def _digest(project: Project, archs: Sequence[str], toolchains: Toolchains, component: str) -> str:
    inputs: list[Any] = [project.name, project.version, archs]
    inputs.append(sorted((platform, tree.identity) for platform, tree in toolchains.lock.get(component, {}).items()))
    own = [path for directory in _CODE for path in sorted(directory.rglob("*")) if path.suffix in (".py", ".h")]
    named = [(path.name, path) for path in (*own, project.root / build_toml.FILE, project.root / aot_toml.FILE)]
    for name, path in (*named, *project.python_files):
        inputs.append([name, file_digest(path)])
    return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:32]


def _build_toml(project: Project, files: Sequence[str], backend: str, archs: Sequence[str]) -> str:
    where = str(project.root / build_toml.FILE)
    document, _ = editions.as_current(toml_file.read(project.root / build_toml.FILE), TomlPlace(where))
    general: Mapping[str, Any] = document["general"]
    kept = {name: value for name, value in general.items() if not isinstance(value, dict) or name in ("hub", backend)}
    framework = {key: value for key, value in document["torch-noarch"].items() if key == "pyext"}
    kernel = {
        "language": f"cpp-{backend}",
        {"cuda": "cuda-capabilities", "rocm": "rocm-archs"}[backend]: list(archs),
        "depends": ["torch"],
        "include": ["."],
        "src": list(files),
    }
    made = {
        "general": {**kept, "edition": 6, "backends": [backend]},
        "torch": {**framework, "stable-abi": str(aot_toml.STABLE_ABI), "src": []},
        "kernel": {project.python_name: kernel},
    }
    return tomlkit.dumps(made)
