"""Checks the requirements of builds on this machine, for `kernel-builder doctor`. Uses no network."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kernel_builder.backends.compiled import CLANG
from kernel_builder.backends.cuda import toolkits
from kernel_builder.config.variant import PLATFORMS, this_platform
from kernel_builder.toolchain import components
from kernel_builder.toolchain.lock import Tree
from kernel_builder.toolchain.toolchains import Toolchains
from kernel_format.errors import ToolchainError

CPU, CUDA, LOAD = "cpu", "cuda", "load checks"
BUILDS = (CPU, CUDA)

# Where distributions and NVIDIA's packages install a toolkit.
_USUAL_CUDA = Path("/usr/local/cuda")


@dataclass(frozen=True)
class Requirement:
    """Something that builds need or can use.

    Attributes:
        value: The version or state on this machine; None if it is missing.
        needed_for: The kinds of build that need it; empty if it is optional.
        hint: The command or edit that provides it.
    """

    name: str
    value: str | None
    needed_for: tuple[str, ...] = ()
    hint: str | None = None

    @property
    def ok(self) -> bool:
        return self.value is not None


def survey(toolchains: Toolchains) -> list[Requirement]:
    """Return everything that a build on this machine may need, the most needed first."""
    return [
        Requirement("Python", platform.python_version()),
        _platform(),
        _host_compiler(toolchains),
        *_cross_compilers(toolchains),
        _ninja(),
        _installed_cuda(toolchains),
        *_components(toolchains),
        _python_package("torch", "python -m pip install torch"),
        _python_package("kernels", "python -m pip install kernels"),
        _program("git", "apt-get install git, or dnf install git", "--version"),
        _gpu(),
    ]


def ready(requirements: list[Requirement], build: str) -> bool:
    """Return whether this machine has everything that a kind of build needs."""
    return all(requirement.ok for requirement in requirements if build in requirement.needed_for)


def _platform() -> Requirement:
    here = this_platform()
    return Requirement(
        "platform",
        here if here in PLATFORMS else None,
        BUILDS,
        f"kernels are not built for {here}: use a machine that is {' or '.join(PLATFORMS)}",
    )


def _host_compiler(toolchains: Toolchains) -> Requirement:
    try:
        compiler = toolchains.host()
    except ToolchainError as error:
        return Requirement("g++", None, BUILDS, f"{error}; {error.hint}")
    return Requirement("g++", f"{compiler.version} at {compiler.path}", BUILDS)


def _cross_compilers(toolchains: Toolchains) -> Iterator[Requirement]:
    """Yield the compilers for other platforms, which only `build --platform` needs."""
    for other in PLATFORMS:
        if other == this_platform():
            continue
        name = f"g++ ({other.partition('-')[0]})"
        try:
            compiler = toolchains.host(other)
        except ToolchainError as error:
            yield Requirement(name, None, (), f"{error}; {error.hint}")
        else:
            yield Requirement(name, f"{compiler.version} at {compiler.path}")


def _ninja() -> Requirement:
    hint = "python -m pip install ninja"
    program = _program("ninja", hint, "--version")
    return Requirement("ninja", program.value or _python_package("ninja", hint).value, BUILDS, hint)


def _installed_cuda(toolchains: Toolchains) -> Requirement:
    name = "CUDA toolkit"
    try:
        if toolkit := toolkits.installed(toolchains):
            return Requirement(name, f"{toolkit.version} at {toolkit.root}")
        if (_USUAL_CUDA / "bin/nvcc").exists():
            version, _ = toolkits.probe(toolchains.probes, _USUAL_CUDA / "bin/nvcc")
            return Requirement(name, f"{version}, used with `--cuda-home {_USUAL_CUDA}`")
    except ToolchainError as error:
        return Requirement(name, None, (CUDA,), f"{error}; {error.hint}")
    return Requirement(name, None, (), "needed only for CUDA releases that the lock does not have")


def _components(toolchains: Toolchains) -> Iterator[Requirement]:
    """Yield the pinned compilers and headers, without those of Torch."""
    for name, component in components.known().items():
        if name.startswith("torch-"):
            continue
        needed_for = (CUDA,) if _is_cuda_compiler(name) else ()
        try:
            is_library = component.license is not None
            missing = (toolchains.dependency_obstacle if is_library else toolchains.component_obstacle)(name)
        except ToolchainError as error:
            yield Requirement(component.title, None, (), f"{error}; {error.hint}")
            continue
        if missing:
            yield Requirement(component.title, None, needed_for, f"{missing.reason}; {missing.hint}")
        elif name in toolchains.given_dependencies:
            yield Requirement(component.title, f"at {toolchains.given_dependencies[name]}")
        else:
            tree = toolchains.lock[name].tree(this_platform())
            assert tree
            yield Requirement(component.title, _state(toolchains, tree), needed_for)


def _is_cuda_compiler(name: str) -> bool:
    return name == CLANG or re.fullmatch(r"cuda-\d+\.\d+", name) is not None


def _state(toolchains: Toolchains, tree: Tree) -> str:
    stored = toolchains.store.find(tree.name) is not None
    return "in the store" if stored else f"{tree.download / 1e6:.0f} MB to download at first use"


def _python_package(name: str, hint: str) -> Requirement:
    try:
        return Requirement(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Requirement(name, None, (LOAD,), hint)


def _program(name: str, hint: str, *arguments: str) -> Requirement:
    return Requirement(name, _first_line(name, *arguments), (), hint)


def _gpu() -> Requirement:
    return Requirement(
        "GPU",
        _first_line("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"),
        (),
        "not needed to build, only to load and measure CUDA kernels",
    )


def _first_line(program: str, *arguments: str) -> str | None:
    """Return the first line that a program prints, or None if it is missing or fails."""
    path = shutil.which(program)
    if path is None:
        return None
    try:
        done = subprocess.run([path, *arguments], capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.splitlines()), "").strip() or path
