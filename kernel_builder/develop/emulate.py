"""Builds a project's CUDA or ROCm kernels for the CPU, with the emulator of `templates/emulator`, and runs its tests.

What is built is a project, too: a copy whose only back end is the CPU, with the emulator among its sources. The public
client loads its package, so that tests and their choice of a device need not know of the emulator.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

from kernel_builder.config.project import HEADER_SUFFIXES, Kernel, Project, TorchFramework
from kernel_builder.develop.emulated_sources import STAND_INS, translate
from kernel_builder.develop.local_build import build_for_device
from kernel_builder.errors import ConfigError

_TEMPLATES = Path(__file__).parents[1] / "templates" / "emulator"
_DIRECTORY = "emulator"  # of the emulator's files in the copy
_DEVICE_SUFFIXES = frozenset({".cu", ".hip"})
_SOURCE_SUFFIXES = _DEVICE_SUFFIXES | {".cc", ".cpp", ".cxx"}
_NOT_COPIED = shutil.ignore_patterns("build", "naive", ".*", "__pycache__", "*.egg-info")

# Faults of kernels that the compiler finds, and values of variables that nothing has written: NaN, or 0xfe bytes.
_FLAGS = ("-O1", "-fsanitize=bounds,alignment,integer-divide-by-zero", "-ftrivial-auto-var-init=pattern")
_DEFINES = {
    "cuda": ("-UCPU_KERNEL", "-DCUDA_KERNEL", "-DUSE_CUDA"),
    "rocm": ("-UCPU_KERNEL", "-DROCM_KERNEL", "-DUSE_CUDA", "-DUSE_ROCM=1", "-D__HIP_PLATFORM_AMD__=1"),
}


def emulated(project: Project, backend: str | None, warp_size: int, directory: Path) -> None:
    """Write a project that emulates one, and build its package for the installed Torch.

    Args:
        backend: "cuda" or "rocm". None: "rocm" if the project has kernels for it.
        warp_size: 32 or 64, the latter for ROCm only.
        directory: Where to write it. What is there is replaced, except for its packages.

    Raises:
        KernelBuilderError: If the project cannot be emulated or built.
    """
    kernels = _kernels(project, backend, warp_size)
    assert isinstance(project.framework, TorchFramework)
    chosen = kernels[0].backend
    defines = (*_DEFINES[chosen], "-DKERNEL_BUILDER_EMULATOR", f"-DEMULATED_WARP_SIZE={warp_size}")
    for old in directory.iterdir() if directory.is_dir() else ():
        if old.name != "build":
            shutil.rmtree(old) if old.is_dir() else old.unlink()
    shutil.copytree(project.root, directory, ignore=_NOT_COPIED, dirs_exist_ok=True)
    listed = {name for table in (project.framework, *kernels) for name in table.src}
    for path in [path for path in directory.rglob("*") if path.suffix in _SOURCE_SUFFIXES | HEADER_SUFFIXES]:
        name = path.relative_to(directory).as_posix()
        is_header = path.suffix in HEADER_SUFFIXES
        if is_header or name in listed:
            is_device_source = path.suffix in _DEVICE_SUFFIXES
            text = path.read_text(encoding="utf-8", errors="surrogateescape")
            translated = translate(name, text, is_device_source=is_device_source, is_header=is_header)
            (directory / _renamed(name)).write_text(translated, encoding="utf-8", errors="surrogateescape")
    shutil.copytree(_TEMPLATES, directory / _DIRECTORY)
    for header, stand_in in STAND_INS.items():
        (directory / _DIRECTORY / header).parent.mkdir(parents=True, exist_ok=True)
        (directory / _DIRECTORY / header).write_text(f'#include "{stand_in}"\n')
    (directory / "build.toml").write_text(_build_toml(project, project.framework, kernels, defines))
    build_for_device(directory, "cpu")


def default_directory(project: Project, backend: str | None, warp_size: int, cache: Path) -> Path:
    """Return where a project is emulated if the user names no directory."""
    digest = hashlib.sha256(os.fsencode(project.root)).hexdigest()[:8]
    return cache / "emulated" / f"{project.name}-{digest}-{backend or 'any'}-{warp_size}"


def run_tests(directory: Path, arguments: Sequence[str]) -> int:
    """Run pytest on the tests of an emulated project, and return its exit status."""
    no_devices = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-p", "kernel_builder.develop.emulated_tests", "--rootdir=."]
    return subprocess.run([*command, "tests", *arguments], cwd=directory, env={**os.environ, **no_devices}).returncode


def _kernels(project: Project, backend: str | None, warp_size: int) -> list[Kernel]:
    """Return the kernels to emulate, of one back end."""
    where = str(project.root / "build.toml")
    if not isinstance(project.framework, TorchFramework):
        raise ConfigError("has no sources for the emulator", where=where, hint="it compiles kernels of a [torch] table")
    by_backend = {name: [kernel for kernel in project.kernels if kernel.backend == name] for name in ("rocm", "cuda")}
    present = [name for name, kernels in by_backend.items() if kernels and backend in (None, name)]
    if not present:
        wanted = backend or "cuda or rocm"
        raise ConfigError(f"has no {wanted} kernel to emulate", where=where, hint="name another --backend")
    if warp_size == 64 and present[0] != "rocm":
        raise ConfigError(
            "a warp of CUDA has 32 threads; expected a kernel for ROCm",
            where=where,
            hint='add a [kernel.NAME] table with backend = "rocm" and the same sources, or use --warp-size 32',
        )
    return by_backend[present[0]]


def _renamed(name: str) -> str:
    return f"{name}.cpp" if PurePosixPath(name).suffix in _DEVICE_SUFFIXES else name


def _build_toml(
    project: Project, framework: TorchFramework, kernels: Sequence[Kernel], defines: tuple[str, ...]
) -> str:
    general: dict[str, object] = {
        "name": project.name,
        "version": project.version,
        "license": project.license,
        "edition": 5,
        "backends": ["cpu"],
        "python-depends": list(project.python_depends),
    }
    torch: dict[str, object] = {
        "include": [*framework.include, _DIRECTORY],
        "src": [*framework.src, f"{_DIRECTORY}/emulator.cpp"],
        "cxx-flags": [*_kept(framework.cxx_flags), *defines],
    }
    if stable := framework.stable_abi.get(kernels[0].backend):
        torch["stable-abi"] = str(stable)
    lines = [*_table("general", general), *_table("torch", torch)]
    for kernel in kernels:
        flags = [*_kept((*kernel.cxx_flags, *kernel.cuda_flags, *kernel.hip_flags)), *defines, *_FLAGS]
        values = {
            "backend": "cpu",
            "depends": list(kernel.depends),
            "include": [*kernel.include, _DIRECTORY],
            "cxx-flags": flags,
            "src": [_renamed(name) for name in kernel.src],
        }
        lines += _table(f"kernel.{kernel.name}", values)
    return "\n".join(lines)


def _kept(flags: Sequence[str]) -> list[str]:
    """Return the flags that mean the same to every compiler."""
    return [flag for flag in flags if flag.startswith(("-D", "-U", "-std=", "--std="))]


def _table(name: str, values: Mapping[str, object]) -> Iterator[str]:
    yield f"[{name}]"
    for key, value in values.items():
        yield f"{key} = {json.dumps(value)}"  # of numbers, texts and lists of texts, JSON is TOML
    yield ""
