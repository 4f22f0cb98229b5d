"""What the toolchain room hands out: files to compile with, and an identity that stands for their content.

An identity is a hex digest. Equal identities mean equal output from equal input, on any machine: no identity takes in
a path, a time or a host name.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kernel_builder.config.variant import Release

Subset = Literal["stable", "full"]


@dataclass(frozen=True)
class HostCompiler:
    """The g++ that compiles host code and links.

    Attributes:
        path: The program.
        version: E.g. `12.2.0`.
        identity: Digest of its version output and of the programs that it runs.
    """

    path: Path
    version: str
    identity: str


@dataclass(frozen=True)
class CudaToolkit:
    """An nvcc and all that it needs.

    Attributes:
        root: Holds `bin/`, `nvvm/`, `include/`.
        release: E.g. 13.0.
        version: nvcc's own, e.g. `13.0.88`.
        include: Directories for a host compiler; nvcc finds them itself.
        lib: The directory of the CUDA runtime libraries.
        origin: `index` for pinned wheels, `system` for a toolkit of the user's.
        capabilities: What nvcc compiles for, ascending, e.g. `9.0`; without architecture-specific ones.
    """

    root: Path
    release: Release
    version: str
    nvcc: Path
    include: tuple[Path, ...]
    lib: Path
    identity: str
    origin: Literal["index", "system"]
    capabilities: tuple[str, ...]


@dataclass(frozen=True)
class TorchHeaders:
    """The C++ headers of one Torch release.

    Attributes:
        version: The wheel's, e.g. `2.10.0`.
        subset: `stable` for the stable ABI's headers and what they include, `full` for all.
        include: Directories in the order that a compiler searches them.
    """

    release: Release
    version: str
    subset: Subset
    include: tuple[Path, ...]
    identity: str


@dataclass(frozen=True)
class Obstacle:
    """Why no provider on this machine has a toolchain, and what to do about it."""

    reason: str
    hint: str
