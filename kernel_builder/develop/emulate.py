"""Builds a project's CUDA or ROCm kernels for the CPU, with torch-kernel-emulator, and runs its tests.

The emulated project is a copy of the project whose only back end is the CPU, with the emulator among its sources. The
public client loads its package, so that tests and their choice of a device do not depend on the emulator.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

import tomlkit

from kernel_builder import backends
from kernel_builder.backends import CompiledBackend
from kernel_builder.config.project import HEADER_SUFFIXES, Kernel, Project, TorchFramework
from kernel_builder.config.project_files import files_below
from kernel_builder.develop.choice import build_for_device
from kernel_builder.develop.emulated_sources import translate
from kernel_emulator import DIRECTORY as EMULATOR
from kernel_emulator import FLAGS
from kernel_format.errors import ConfigError

_DIRECTORY = "emulator"  # directory of the emulator's files in the copy
_DEVICE_SUFFIXES = frozenset({".cu", ".hip"})
_SOURCE_SUFFIXES = _DEVICE_SUFFIXES | {".cc", ".cpp", ".cxx"}
_NOT_COPIED = r"build|\..*|.*\.egg-info"


def emulated(project: Project, backend: str | None, warp_size: int, directory: Path) -> None:
    """Write the emulated copy of a project, and build its package for the installed Torch.

    Args:
        backend: The name of a back end with `warp_sizes`, or None to select one by the project's kernels. Sources that
            a back end translates replace sources of its own.
        warp_size: One of these sizes.
        directory: The directory of the copy. Earlier contents are replaced, except for packages.

    Raises:
        KernelBuilderError: If the project cannot be emulated or built.
    """
    kernels = _kernels(project, backend, warp_size)
    assert isinstance(project.framework, TorchFramework)
    chosen = backends.compiled(kernels[0].backend)
    # The emulator replaces CUDA's headers, also for other back ends.
    of_backend = dict.fromkeys((f"-D{chosen.name.upper()}_KERNEL", "-DUSE_CUDA", *chosen.defines))
    translated_for: tuple[str, ...] = ()
    if chosen.translates and chosen not in project.backends:
        translated_for = (f"-D{chosen.translates.name.upper()}_KERNEL",)
    defines = ("-UCPU_KERNEL", *of_backend, *translated_for, "-DKERNEL_BUILDER_EMULATOR")
    for old in directory.iterdir() if directory.is_dir() else ():
        if old.name != "build":
            shutil.rmtree(old) if old.is_dir() else old.unlink()
    for path in files_below(project.root, project.root, ("",), _NOT_COPIED):
        copy = directory / path.relative_to(project.root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    listed = {*project.framework.src, *(name for kernel in kernels for name in kernel.src)}
    for path in [path for path in directory.rglob("*") if path.suffix in _SOURCE_SUFFIXES | HEADER_SUFFIXES]:
        name = path.relative_to(directory).as_posix()
        is_header = path.suffix in HEADER_SUFFIXES
        if is_header or name in listed:
            is_device_source = path.suffix in _DEVICE_SUFFIXES
            text = path.read_text(encoding="utf-8", errors="surrogateescape")
            translated = translate(name, text, is_device_source=is_device_source, is_header=is_header)
            (directory / _renamed(name)).write_text(translated, encoding="utf-8", errors="surrogateescape")
    shutil.copytree(EMULATOR, directory / _DIRECTORY, dirs_exist_ok=True)
    (directory / "build.toml").write_text(_build_toml(project, project.framework, kernels, defines, warp_size))
    build_for_device(directory, "cpu", load=False)  # the tests load it


def default_directory(project: Project, backend: str | None, warp_size: int, cache: Path) -> Path:
    """Return the directory of a project's emulated copy, which one command at a time uses."""
    digest = hashlib.sha256(os.fsencode(project.root)).hexdigest()[:8]
    return cache / "emulated" / f"{project.name}-{digest}-{backend or 'any'}-{warp_size}"


def run_tests(directory: Path, arguments: Sequence[str]) -> int:
    """Run pytest on the tests of an emulated project, and return its exit status."""
    variables = {"KERNEL_BUILDER_EMULATOR": "1", "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-p", "kernel_builder.develop.emulated_tests", "--rootdir=."]
    environment = {**os.environ, **variables}
    return subprocess.run([*command, "tests", *arguments], cwd=directory, env=environment, check=False).returncode


def _kernels(project: Project, backend: str | None, warp_size: int) -> list[Kernel]:
    """Return the kernels to emulate, of one back end."""
    where = str(project.root / "build.toml")
    if not isinstance(project.framework, TorchFramework):
        raise ConfigError(
            "the project has no sources for the emulator", where=where, hint="the emulator needs a [torch] table"
        )
    if not project.framework.stable_abi:
        raise ConfigError(
            "the project uses the full C++ ABI, whose CUDA functions the emulator does not have",
            where=where,
            hint='use the stable ABI: [torch] stable-abi = "2.10"',
        )
    every = [known for known in backends.every() if known.warp_sizes]
    able = [known for known in every if warp_size in known.warp_sizes]
    named = [known for known in able if backend in (None, known.name)]
    if not named:
        known = next(known for known in every if known.name == backend)
        raise ConfigError(
            f"a warp of {known.title} has {' or '.join(map(str, known.warp_sizes))} threads",
            where=f"--warp-size {warp_size}",
            hint=f"remove --backend, or use --backend {' or '.join(known.name for known in able)}",
        )
    for known in sorted(named, key=lambda known: known.translates is None):
        kernels = [kernel for kernel in project.kernels if kernel.backend is known]
        # The sources of the back end that it translates replace its own, as hipify would translate them.
        if not kernels and known.translates:
            sources = [kernel for kernel in project.kernels if kernel.backend is known.translates]
            kernels = sources if len(named) == 1 or _has_plain_bodies(project.root, sources, known) else []
        if kernels:
            return [replace(kernel, backend=known) for kernel in kernels]
    raise ConfigError(
        f"the project has no kernel for {backend or ' or '.join(known.name for known in every)} to emulate",
        where=where,
        hint="use another --backend" if backend else "write CUDA kernels: the emulator runs no others",
    )


def _has_plain_bodies(root: Path, kernels: Sequence[Kernel], backend: CompiledBackend) -> bool:
    """Return whether sources have code for a back end beside inline assembly, as the kit has."""
    paths = (root / name for kernel in kernels for name in kernel.src)
    text = "".join(path.read_text(encoding="utf-8", errors="replace") for path in paths)
    return f"USE_{backend.name.upper()}" in text and re.search(r"\basm\b", text) is not None


def _renamed(name: str) -> str:
    return f"{name}.cpp" if PurePosixPath(name).suffix in _DEVICE_SUFFIXES else name


def _build_toml(
    project: Project, framework: TorchFramework, kernels: Sequence[Kernel], defines: tuple[str, ...], warp_size: int
) -> str:
    general = {
        "name": project.name,
        "version": project.version,
        "license": project.license,
        "edition": 6,
        "backends": ["cpu"],
        "python-depends": list(project.python_depends),
    }
    torch = {
        "stable-abi": str(min(framework.stable_abi.values())),
        "include": [*framework.include, _DIRECTORY],
        "src": list(framework.src),
        # A binding is compiled for each size of a warp, and computes little.
        "cxx-flags": [*_kept(framework.cxx_flags), *defines, "-O0"],
    }
    tables = {
        kernel.name: {
            "language": "cpp-cpu",
            "depends": list(kernel.depends),
            "include": [*kernel.include, _DIRECTORY],
            "cxx-flags": [*_kept((*kernel.cxx_flags, *kernel.cuda_flags, *kernel.hip_flags)), *defines, *FLAGS],
            "src": [_renamed(name) for name in kernel.src],
        }
        for kernel in kernels
    }
    # Objects of the project are the same for each warp size.
    tables["emulator_of_kernel_builder"] = {
        "language": "cpp-cpu",
        "depends": [],
        "include": [_DIRECTORY],
        "cxx-flags": [*defines, f"-DEMULATED_WARP_SIZE={warp_size}"],
        "src": [f"{_DIRECTORY}/{path.name}" for path in sorted(EMULATOR.glob("*.cpp"))],
    }
    return tomlkit.dumps({"general": general, "torch": torch, "kernel": tables})


def _kept(flags: Sequence[str]) -> list[str]:
    """Return the flags that mean the same to every compiler."""
    return [flag for flag in flags if flag.startswith(("-D", "-U", "-std=", "--std="))]
