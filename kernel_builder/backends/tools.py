"""Compilers and headers as values: where the files are, and an identity that stands for their content.

An identity is a hex digest. Tools of equal identity make equal output from equal input on every machine; no path, time
or host name enters the digest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from kernel_builder.probe_cache import ProbeCache
from kernel_format.release import Release

Subset = Literal["stable", "full"]  # the headers of Torch's stable ABI and those that they include, or all
CudaCompiler = Literal["nvcc", "clang"]


class HostCompiler(NamedTuple):
    """The g++ that compiles host code and links."""

    path: Path
    platform: str
    version: str  # for example `12.2.0`
    identity: str  # digest of its version output and of the programs that it runs
    headers: tuple[str, ...]  # regular expressions for the paths of its own headers and of the C library's
    install: Path  # the directory of its own headers and start files
    cxx_include: tuple[str, ...]  # where it searches for the headers of its C++ library
    c_include: tuple[str, ...]  # where it searches for those of the C library, after its own


class ComponentFiles(NamedTuple):
    """A component of a back end's toolchain, such as a compiler or headers: files below `root`."""

    root: Path
    version: str
    identity: str


@dataclass(frozen=True, kw_only=True)
class Toolkit:
    """The compiler of a back end with its headers."""

    name: str  # the name of its directory in commands: that of the back end
    root: Path  # the directory that commands and steps may read
    # The release that it compiles with. It may be newer than that of the variants that it builds.
    release: Release | None
    include: tuple[Path, ...]  # include directories below `root` for a host compiler
    identity: str  # digest of its content, equal on every machine


class HeaderLibrary(NamedTuple):
    """Headers that a source needs besides those of its compiler."""

    name: str  # for example `torch`, `cutlass_3_8` or `cuda-libraries-13.0`
    root: Path  # the directory that holds all include directories
    include: tuple[Path, ...]  # include directories in the order that a compiler searches them
    identity: str


class Obstacle(NamedTuple):
    """Why a toolchain is unavailable on this machine, and the remedy."""

    reason: str
    hint: str


class ToolchainSource(Protocol):
    """The toolchains of a build as back ends see them; `toolchain.Toolchains` implements this protocol."""

    cache: Path  # the builder's cache directory
    store_root: Path  # the directory of the store with the pinned files
    probes: ProbeCache  # answers of compilers outside the store
    cuda_home: Path | None  # the installed CUDA toolkit that the user named
    cuda_compiler: CudaCompiler | None  # the compiler that the user chose for all CUDA variants

    def component(self, name: str) -> ComponentFiles:
        """Return a component, fetched if need be."""

    def component_obstacle(self, name: str) -> Obstacle | None:
        """Return why a component is not available on this machine, or None if it can. No network."""

    def derived(self, name: str, title: str, make: Callable[[Path], None]) -> Path:
        """Return a directory of the store that `make` fills once."""
