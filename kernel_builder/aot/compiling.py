"""Compiles the kernels of a project with the pinned compiler, in the sandbox: variants of ops -> cubins."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kernel_builder.aot.declaration import Variant
from kernel_builder.config import aot_toml
from kernel_builder.config.project import Project
from kernel_builder.config.variant import this_platform
from kernel_builder.steps import confinement
from kernel_builder.steps.confinement import SandboxMode
from kernel_builder.toolchain import Toolchains, components
from kernel_format.errors import BuildError, ConfigError, ToolchainError
from kernel_format.files import temporary_directory

_PLATFORM = "x86_64-linux"
# Number of an architecture -> bytes of shared memory that a block may use.
_SHARED = {80: 166_912, 86: 101_376, 87: 166_912, 89: 101_376, 120: 101_376, 121: 101_376, 0x950: 163_840}
_SHARED_FROM_9, _SHARED_OF_AMD = 232_448, 65_536
_AMD = 0x900  # the lowest number of an architecture of AMD


@dataclass(frozen=True)
class Cubin:
    """Machine code of a kernel for one capability, or PTX, and the launch that it needs.

    Attributes:
        capability: 90 for 9.0, and 0x942 for gfx942.
        image: The cubin, or PTX that ends in a zero byte.
        scratch: Bytes of global memory that each block needs.
        ptx: The text that the cubin is made of, with a zero byte at its end.
    """

    capability: int
    is_ptx: bool
    image: bytes
    name: str
    threads: int
    shared: int
    scratch: int
    ptx: bytes = b""


def arch_number(arch: str) -> int:
    """Return the number of an architecture in generated code: 90 for 9.0, and 0x942 for gfx942."""
    return int(arch.removeprefix("gfx"), 16) if arch.startswith("gfx") else int(arch.replace(".", ""))


@dataclass(frozen=True)
class Language:
    """A language of kernels, and its compiler.

    Attributes:
        title: The compiler's name.
        programs: The scripts that compile in the sandbox; the first is started.
        component: aot.toml's tables -> the component with the compiler for this Python.
        job: A variant -> its part of the request.
        read: The capability, the script's result, its file, and the source -> the compiled kernel, which has an
            attribute `shared`.
    """

    title: str
    programs: tuple[Path, ...]
    component: Callable[[Mapping[str, Any]], str]
    job: Callable[[Variant], dict[str, Any]]
    read: Callable[[int, dict[str, Any], Path, Path], Any]


def python_tag() -> str:
    """Return the tag of this Python in the names of components."""
    return f"cp{sys.version_info.major}{sys.version_info.minor}"


def _triton(tables: Mapping[str, Any]) -> str:
    version = tables.get("triton", aot_toml.SCHEMA["properties"]["triton"]["enum"][0])
    return components.triton(version, python_tag())


def compile_all(
    project: Project,
    variants: Sequence[Variant],
    archs: Sequence[str],
    toolchains: Toolchains,
    mode: SandboxMode,
    jobs: int | None,
) -> list[tuple[Cubin, ...]]:
    """Return the cubins of each variant of Triton's kernels, ascending by capability. Raises as `compiled` does."""
    rows = compiled(project, TRITON, variants, archs, toolchains, mode, jobs)
    with_ptx = aot_toml.read(project.root).get("ptx")
    return [_with_ptx(row) if with_ptx else tuple(row) for row in rows]


def compiled(
    project: Project,
    language: Language,
    variants: Sequence[Variant],
    archs: Sequence[str],
    toolchains: Toolchains,
    mode: SandboxMode,
    jobs: int | None,
) -> list[list[Any]]:
    """Return the compiled kernels of each variant, ascending by capability.

    Raises:
        ConfigError: If a kernel cannot be compiled for a capability.
        ToolchainError: If this machine cannot run the pinned compiler.
    """
    tables = aot_toml.read(project.root)
    component = language.component(tables)
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
    request = {
        "package": package,
        "module": ".".join(source.with_suffix("").parts[1:]),
        "processes": jobs or len(os.sched_getaffinity(0)),
        "jobs": [
            {"number": position, "kernel": variant.op.kernel, "target": _target(arch), **language.job(variant)}
            for position, (variant, arch) in enumerate(pairs)
        ],
    }
    with temporary_directory() as scratch:
        for name, path in project.python_files:
            copy = scratch / "src" / package / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
        (scratch / "out").mkdir()
        (scratch / "request.json").write_text(json.dumps(request))
        _run(scratch, root, language, confinement.chosen(mode, toolchains.host().path))
        results = list(_results(scratch / "out", pairs, language, project.root / source))
    size = len(archs)
    return [results[start : start + size] for start in range(0, len(results), size)]


def _job(variant: Variant) -> dict[str, Any]:
    return {
        "signature": dict(variant.signature),
        "constants": dict(variant.constants),
        "divisible": variant.divisible,
        "options": dict(variant.config.options),
    }


def _target(arch: str) -> tuple[str, str | int, int]:
    """Return the arguments of Triton's GPUTarget. AMD's compiler replaces the size of a warp where it is another."""
    return ("hip", arch, 64) if arch.startswith("gfx") else ("cuda", arch_number(arch), 32)


def _run(scratch: Path, root: Path, language: Language, chosen: confinement.Confinement) -> None:
    command = [sys.executable, "-I", "-S", str(language.programs[0]), "request.json", str(root)]
    environment = {
        "PATH": os.environ.get("PATH", ""),
        "HOME": str(scratch),
        "TMPDIR": str(scratch),
        "TRITON_CACHE_DIR": str(scratch / "cache"),
        "TRITON_BACKENDS_IN_TREE": "1",
        # Line numbers come with the names of directories, which would differ between two builds.
        "TRITON_DISABLE_LINE_INFO": "1",
    }
    done = subprocess.run(
        chosen.around(command, scratch, [*language.programs, root]),
        cwd=scratch,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        raise BuildError(
            f"{language.title} ended with status {done.returncode}", where=str(root), output=done.stdout[-4000:]
        )


def _results(out: Path, pairs: Iterable[tuple[Variant, str]], language: Language, source: Path) -> Iterable[Any]:
    if (out / "error.json").exists():
        error = json.loads(read_output(out / "error.json"))["error"]
        raise ConfigError(
            f"cannot be imported with {language.title} alone: {error}",
            where=str(source),
            hint="keep code that needs other modules at import out of the module with the kernels",
        )
    for number, (variant, arch) in enumerate(pairs):
        file = out / f"{number}.json"
        title = f"{variant.label} for {arch}" if arch.startswith("gfx") else f"{variant.label} for capability {arch}"
        if not file.exists():
            raise BuildError(f"{language.title}'s process ended while it compiled {title}", where=str(source))
        result: dict[str, Any] = json.loads(read_output(file))
        if error := result.get("error"):
            line = f":{result['line']}" if result["line"] else ""
            raise ConfigError(
                f"{variant.op.kernel} does not compile, {title}: {error}",
                where=f"{source}{line}",
                hint="correct the kernel, or its types and values in aot.toml",
            )
        kernel = language.read(arch_number(arch), result, file, source)
        if kernel.shared > (limit := shared_memory(arch_number(arch))):
            raise ConfigError(
                f"{title} needs {kernel.shared} bytes of shared memory, and a block has {limit}",
                where=str(source),
                hint=f"use smaller blocks or a smaller num_stages, or leave {arch} out of "
                + ("`rocm_archs` in build.toml" if arch.startswith("gfx") else "`capabilities` in aot.toml"),
            )
        yield kernel


def shared_memory(capability: int) -> int:
    """Return the bytes of shared memory that a block may use; see `arch_number`."""
    return _SHARED.get(capability, _SHARED_FROM_9 if capability < _AMD else _SHARED_OF_AMD)


def read_output(path: Path) -> bytes:
    """Return the content of a file that the author's code may have replaced by a link to a private one."""
    if path.resolve() != path.parent.parent.resolve() / path.parent.name / path.name or not path.is_file():
        raise BuildError("is no file of the sandbox", where=str(path), hint="remove code that links files at import")
    return path.read_bytes()


def _read(capability: int, result: dict[str, Any], file: Path, source: Path) -> Cubin:
    image, text = read_output(file.with_suffix(".cubin")), read_output(file.with_suffix(".ptx")) + b"\0"
    return Cubin(capability, is_ptx=False, image=image, **result, ptx=text)


def _with_ptx(cubins: Sequence[Cubin]) -> tuple[Cubin, ...]:
    """Return cubins, and PTX of the newest capability whose PTX later GPUs run: from 9.0 on, only the same one does."""
    portable = [cubin for cubin in cubins if cubin.capability < 90]
    newest = max(portable, key=lambda cubin: cubin.capability, default=None)
    return (*cubins, *([replace(newest, is_ptx=True, image=newest.ptx)] if newest else []))


TRITON = Language("Triton", (Path(__file__).with_name("compile_kernels.py"),), _triton, _job, _read)
