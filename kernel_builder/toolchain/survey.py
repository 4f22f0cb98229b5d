"""Checks the requirements of builds on this machine, for `kernel-builder doctor`. Uses no network."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kernel_builder.backends.cuda import toolkits
from kernel_builder.config.variant import PLATFORMS, this_platform
from kernel_builder.toolchain.toolchains import Toolchains
from kernel_builder.version import first_line, installed
from kernel_format.errors import ToolchainError

CPU, CUDA, LOAD = "cpu", "cuda", "load checks"
BUILDS = (CPU, CUDA)


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
    here = this_platform()
    ninja = "python -m pip install ninja"
    return [
        Requirement("Python", platform.python_version()),
        Requirement(
            "platform",
            here if here in PLATFORMS else None,
            BUILDS,
            f"kernels are not built for {here}: use a machine that is {' or '.join(PLATFORMS)}",
        ),
        _tried("g++", BUILDS, partial(_host, toolchains, here)),
        # Only `build --platform` needs the compilers for other platforms.
        *(
            _tried(f"g++ ({other.partition('-')[0]})", (), partial(_host, toolchains, other))
            for other in PLATFORMS
            if other != here
        ),
        Requirement("ninja", installed("ninja") or first_line("ninja", "--version"), BUILDS, ninja),
        _tried("CUDA toolkit", (), partial(_installed_cuda, toolchains)),
        Requirement("pinned toolchains", _pinned(toolchains)),
        Requirement("torch", installed("torch"), (LOAD,), "python -m pip install torch"),
        Requirement("kernels", installed("kernels"), (LOAD,), "python -m pip install kernels"),
        Requirement("git", first_line("git", "--version"), (), "apt-get install git, or dnf install git"),
        Requirement(
            "GPU",
            first_line("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"),
            (),
            "not needed to build, only to load and measure CUDA kernels",
        ),
    ]


def ready(requirements: list[Requirement], build: str) -> bool:
    """Return whether this machine has everything that a kind of build needs."""
    return all(requirement.ok for requirement in requirements if build in requirement.needed_for)


def _tried(name: str, needed_for: tuple[str, ...], find_out: Callable[[], str]) -> Requirement:
    """Return a requirement with its value, or with the error as its hint."""
    try:
        return Requirement(name, find_out(), needed_for)
    except ToolchainError as error:
        return Requirement(name, None, needed_for, f"{error}; {error.hint}")


def _host(toolchains: Toolchains, target: str) -> str:
    compiler = toolchains.host(target)
    return f"{compiler.version} at {compiler.path}"


def _installed_cuda(toolchains: Toolchains) -> str:
    toolkit = toolkits.installed(toolchains)
    if toolkit is None:
        raise ToolchainError("not named", hint="needed only for CUDA releases that the lock does not have")
    return f"{toolkit.version} at {toolkit.root}"


def _pinned(toolchains: Toolchains) -> str:
    trees = toolchains.pinned()
    stored = sum(toolchains.store.find(tree.name) is not None for tree in trees)
    return f"{stored} of {len(trees)} in the store, others are downloaded at first use: `kernel-builder toolchain list`"
