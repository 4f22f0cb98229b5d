"""Finds out what builds need and whether this machine has it, for `kernel-builder doctor`. Uses no network."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kernel_builder.config.variant import PLATFORMS, this_platform
from kernel_builder.toolchain import components, dependencies, system_cuda
from kernel_builder.toolchain.probe_cache import ProbeCache
from kernel_builder.toolchain.toolchains import Toolchains
from kernel_builder.toolchain.trees import Tree
from kernel_format.errors import ToolchainError

CPU, CUDA, LOAD = "cpu", "cuda", "load checks"
BUILDS = (CPU, CUDA)

# Where distributions and NVIDIA's packages install a toolkit.
_USUAL_CUDA = Path("/usr/local/cuda")


@dataclass(frozen=True)
class Requirement:
    """Something that builds need or can use.

    Attributes:
        value: What this machine has, as a text for people; None if it has nothing.
        needed_for: The kinds of build that need it; empty if it is optional.
        mend: What to do if it is missing.
    """

    name: str
    value: str | None
    needed_for: tuple[str, ...] = ()
    mend: str | None = None

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
        *_cuda(toolchains),
        *_components(toolchains),
        *_header_libraries(toolchains),
        _disk(toolchains),
        _python_package("torch", "python -m pip install torch"),
        _python_package("kernels", "python -m pip install kernels"),
        _program("git", "apt-get install git, or dnf install git", "--version"),
        Requirement("processors", str(len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count())),
        Requirement("memory", f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 1e9:.1f} GB"),
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
    mend = "python -m pip install ninja"
    program = _program("ninja", mend, "--version")
    return Requirement("ninja", program.value or _python_package("ninja", mend).value, BUILDS, mend)


def _cuda(toolchains: Toolchains) -> Iterator[Requirement]:
    """Yield the installed toolkit and the pinned ones. One of them is enough for CUDA builds."""
    named: str | None = None
    try:
        if toolkit := toolchains.system_cuda():
            named = f"{toolkit.version} at {toolkit.root}"
            yield Requirement("CUDA toolkit", named)
        elif (_USUAL_CUDA / "bin/nvcc").exists():
            version, _ = system_cuda.probe(ProbeCache(toolchains.store.root / "probes"), _USUAL_CUDA / "bin/nvcc")
            yield Requirement("CUDA toolkit", f"{version}, used with `--cuda-home {_USUAL_CUDA}`")
        else:
            yield Requirement("CUDA toolkit", None, (), "needed only for CUDA releases that the lock does not have")
    except ToolchainError as error:
        yield Requirement("CUDA toolkit", None, (CUDA,), f"{error}; {error.hint}")
        return
    pinned = [tree for tree in toolchains.pinned() if tree.role == "compiler"]
    for tree in pinned:
        yield Requirement(tree.title, _state(toolchains, tree), (CUDA,))
    if not pinned:
        mend = f"the lock has none for {this_platform()}: install a CUDA toolkit and give `--cuda-home DIR`"
        yield Requirement("CUDA compiler", named, (CUDA,), mend)


def _components(toolchains: Toolchains) -> Iterator[Requirement]:
    """Yield what back ends need besides clang. Only projects for them need it."""
    pinned = {tree.kind: tree for tree in toolchains.pinned() if tree.role == "component"}
    for name, component in components.known().items():
        if missing := toolchains.component_obstacle(name):
            yield Requirement(component.title, None, (), f"{missing.reason}; {missing.hint}")
        else:
            yield Requirement(component.title, _state(toolchains, pinned[name]))


def _header_libraries(toolchains: Toolchains) -> Iterator[Requirement]:
    """Yield what `depends` of a kernel can name. Only projects that name one need it."""
    pinned = {tree.kind: tree for tree in toolchains.pinned() if tree.role == "dependency"}
    for name, library in dependencies.known().items():
        try:
            missing = toolchains.dependency_obstacle(name)
        except ToolchainError as error:
            yield Requirement(name, None, (), f"{error}; {error.hint}")
            continue
        if missing:
            yield Requirement(name, None, (), f"no package index has CUTLASS {library.version}; {missing.hint}")
        elif name in toolchains.given_dependencies:
            yield Requirement(name, f"at {toolchains.given_dependencies[name]}")
        else:
            yield Requirement(name, _state(toolchains, pinned[name]))


def _state(toolchains: Toolchains, tree: Tree) -> str:
    stored = toolchains.store.find(tree.name) is not None
    return "in the store" if stored else f"{tree.download / 1e6:.0f} MB to download at first use"


def _disk(toolchains: Toolchains) -> Requirement:
    store, free = toolchains.store, toolchains.store.free()
    missing = [tree for tree in toolchains.pinned() if tree.role == "compiler" and not store.find(tree.name)]
    needed = max((tree.download + tree.unpacked for tree in missing), default=0)
    if not store.writable():
        return Requirement(
            "disk",
            None,
            BUILDS,
            f"{store.root} cannot be written: set KERNEL_BUILDER_CACHE to a directory you can write",
        )
    return Requirement(
        "disk",
        f"{free / 1e9:.1f} GB free at {store.root}" if free >= needed else None,
        (CUDA,),
        f"{needed / 1e6:.0f} MB needed at {store.root}, {free / 1e6:.0f} MB free: set KERNEL_BUILDER_CACHE to a "
        "directory on another disk",
    )


def _python_package(name: str, mend: str) -> Requirement:
    try:
        return Requirement(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Requirement(name, None, (LOAD,), mend)


def _program(name: str, mend: str, *arguments: str) -> Requirement:
    return Requirement(name, _first_line(name, *arguments), (), mend)


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
