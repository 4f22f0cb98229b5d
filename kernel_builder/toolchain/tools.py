"""Compilers and headers as values: where the files are, and an identity that stands for their content.

An identity is a hex digest. Tools of equal identity make equal output from equal input on every machine; no path, time
or host name enters the digest.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

from kernel_builder.config.variant import Release

Subset = Literal["stable", "full"]
CudaCompiler = Literal["nvcc", "clang"]


class HostCompiler(NamedTuple):
    """The g++ that compiles host code and links.

    Attributes:
        path: The program.
        platform: The platform that it compiles for.
        version: For example `12.2.0`.
        identity: Digest of its version output and of the programs that it runs.
        headers: Extended regular expressions for the paths of its own headers and of the C library's.
        install: The directory of its own headers and start files.
        cxx_include: Where it searches for the headers of its C++ library.
        c_include: Where it searches for those of the C library, after its own.
    """

    path: Path
    platform: str
    version: str
    identity: str
    headers: tuple[str, ...]
    install: Path
    cxx_include: tuple[str, ...]
    c_include: tuple[str, ...]


class Clang(NamedTuple):
    """A clang with its headers.

    Attributes:
        root: The directory with the program `zig`, whose first argument `clang` makes it a clang, and `include/`.
        version: The version of its headers, for example `22.1.7`.
    """

    root: Path
    version: str
    identity: str


class ComponentFiles(NamedTuple):
    """Files that the compiler of a back end needs, in `root`."""

    root: Path
    version: str
    identity: str


class TorchHeaders(NamedTuple):
    """The C++ headers of one Torch release.

    Attributes:
        version: The version of the wheel, for example `2.10.0`.
        subset: `stable` for the headers of the stable ABI and those that they include, `full` for all.
        include: Include directories in the order that a compiler searches them.
    """

    release: Release
    version: str
    subset: Subset
    include: tuple[Path, ...]
    identity: str


class HeaderLibrary(NamedTuple):
    """Headers that a source needs besides those of Torch and the CUDA compiler.

    Attributes:
        name: For example `cutlass_3_8` or `cuda-libraries-13.0`.
        root: The directory that holds all include directories.
        include: Include directories in the order that a compiler searches them.
    """

    name: str
    root: Path
    include: tuple[Path, ...]
    identity: str


class Obstacle(NamedTuple):
    """Why a toolchain cannot be had on this machine, and what to do about it."""

    reason: str
    hint: str
