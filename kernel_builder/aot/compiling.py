"""Compiles the kernels of a project with the pinned Triton, in the sandbox: variants of ops -> cubins."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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

_PROGRAM = Path(__file__).with_name("compile_kernels.py")
_PLATFORM = "x86_64-linux"
# Capability -> bytes of shared memory that a block may use.
_SHARED = {"8.6": 101_376, "8.9": 101_376, "12.0": 101_376, "12.1": 101_376, "8.0": 166_912, "8.7": 166_912}
_SHARED_FROM_9 = 232_448
_SHARED |= {"gfx950": 163_840}
_SHARED_OF_AMD = 65_536


@dataclass(frozen=True)
class Cubin:
    """Machine code of a kernel for one capability, or PTX, and the launch that it needs.

    Attributes:
        capability: 90 for 9.0, and 0x942 for gfx942.
        image: The cubin, or PTX that ends in a zero byte.
        scratch: Bytes of global memory that each block needs.
    """

    capability: int
    is_ptx: bool
    image: bytes
    name: str
    threads: int
    shared: int
    scratch: int


def arch_number(arch: str) -> int:
    """Return the number of an architecture in generated code: 90 for 9.0, and 0x942 for gfx942."""
    return int(arch.removeprefix("gfx"), 16) if arch.startswith("gfx") else int(arch.replace(".", ""))


def triton(tables: Mapping[str, Any]) -> str:
    """Return the component with the Triton of an aot.toml for this Python."""
    version = tables.get("triton", aot_toml.SCHEMA["properties"]["triton"]["enum"][0])
    return components.triton(version, f"cp{sys.version_info.major}{sys.version_info.minor}")


def compile_all(
    project: Project,
    variants: Sequence[Variant],
    archs: Sequence[str],
    toolchains: Toolchains,
    mode: SandboxMode,
    jobs: int | None,
) -> list[tuple[Cubin, ...]]:
    """Return the cubins of each variant, ascending by capability.

    Raises:
        ConfigError: If a kernel cannot be compiled for a capability.
        ToolchainError: If this machine cannot run the pinned Triton.
    """
    if this_platform() != _PLATFORM:
        raise ToolchainError(
            f"Triton is pinned for {_PLATFORM}, and this is {this_platform()}",
            where=str(project.root / aot_toml.FILE),
            hint=f"build the binary variants on {_PLATFORM}",
        )
    tables = aot_toml.read(project.root)
    root = toolchains.component(triton(tables)).root
    source = Path(tables["source"])
    package = project.python_name
    pairs = [(variant, arch) for variant in variants for arch in archs]
    request = {
        "package": package,
        "module": ".".join(source.with_suffix("").parts[1:]),
        "processes": jobs or len(os.sched_getaffinity(0)),
        "jobs": [
            {
                "number": position,
                "kernel": variant.op.kernel,
                "signature": dict(variant.signature),
                "constants": dict(variant.constants),
                "divisible": variant.divisible,
                "options": dict(variant.config.options),
                "target": _target(arch),
            }
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
        _run(scratch, root, confinement.chosen(mode, toolchains.host().path))
        cubins = list(_results(scratch / "out", pairs, project.root / source, bool(tables.get("ptx"))))
    size = len(archs)
    return [_with_ptx(cubins[start : start + size]) for start in range(0, len(cubins), size)]


def _target(arch: str) -> tuple[str, str | int, int]:
    """Return the arguments of Triton's GPUTarget. AMD's compiler replaces the size of a warp where it is another."""
    return ("hip", arch, 64) if arch.startswith("gfx") else ("cuda", arch_number(arch), 32)


def _run(scratch: Path, root: Path, chosen: confinement.Confinement) -> None:
    command = [sys.executable, "-I", "-S", str(_PROGRAM), "request.json", str(root)]
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
        chosen.around(command, scratch, [_PROGRAM, root]),
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
        raise BuildError(f"Triton ended with status {done.returncode}", where="triton", output=done.stdout[-4000:])


def _results(out: Path, pairs: Iterable[tuple[Variant, str]], source: Path, ptx: bool) -> Iterable[tuple[Cubin, bytes]]:
    if (out / "error.json").exists():
        error = json.loads(_read(out / "error.json"))["error"]
        raise ConfigError(
            f"cannot be imported with Triton alone: {error}",
            where=str(source),
            hint="keep code that needs other modules at import out of the module with the kernels",
        )
    for number, (variant, arch) in enumerate(pairs):
        file = out / f"{number}.json"
        title = f"{variant.label} for {arch}" if arch.startswith("gfx") else f"{variant.label} for capability {arch}"
        if not file.exists():
            raise BuildError(f"Triton's process ended while it compiled {title}", where=str(source))
        result: dict[str, Any] = json.loads(_read(file))
        if error := result.get("error"):
            line = f":{result['line']}" if result["line"] else ""
            raise ConfigError(
                f"{variant.op.kernel} does not compile, {title}: {error}",
                where=f"{source}{line}",
                hint="correct the kernel, or its types and values in aot.toml",
            )
        limit = _SHARED.get(arch, _SHARED_OF_AMD if arch.startswith("gfx") else _SHARED_FROM_9)
        if result["shared"] > limit:
            raise ConfigError(
                f"{title} needs {result['shared']} bytes of shared memory, and a block has {limit}",
                where=str(source),
                hint=f"use smaller blocks or a smaller num_stages, or leave {arch} out of "
                + ("`rocm_archs` in build.toml" if arch.startswith("gfx") else "`capabilities` in aot.toml"),
            )
        text = _read(file.with_suffix(".ptx")) + b"\0" if ptx else b""
        yield Cubin(arch_number(arch), is_ptx=False, image=_read(file.with_suffix(".cubin")), **result), text


def _read(path: Path) -> bytes:
    """Return the content of a file that the author's code may have replaced by a link to a private one."""
    if path.resolve() != path.parent.parent.resolve() / path.parent.name / path.name or not path.is_file():
        raise BuildError("is no file of the sandbox", where=str(path), hint="remove code that links files at import")
    return path.read_bytes()


def _with_ptx(compiled: Sequence[tuple[Cubin, bytes]]) -> tuple[Cubin, ...]:
    """Return cubins, and PTX of the newest capability whose PTX later GPUs run: from 9.0 on, only the same one does."""
    cubins = [cubin for cubin, _ in compiled]
    portable = [(cubin, text) for cubin, text in compiled if cubin.capability < 90 and text]
    if portable:
        cubin, text = max(portable, key=lambda pair: pair[0].capability)
        cubins.append(Cubin(**{**vars(cubin), "is_ptx": True, "image": text}))
    return tuple(cubins)
