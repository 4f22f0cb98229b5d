"""Directories of the store that are made from pinned files: toolkits, headers of Torch, header libraries.

`tree_files` makes one.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Literal

from kernel_builder.toolchain.lock import ClangPin, ComponentPin, CudaPin, DependencyPin, PinnedFile, TorchPin
from kernel_builder.toolchain.tools import Subset

# Increase when equal pinned files are unpacked to different trees: trees of older builders are then not used.
RECIPE = 1

# The program of the ziglang wheel, which is clang too.
ZIG = "zig"

TreeRole = Literal["compiler", "libraries", "torch", "dependency", "component"]


@dataclass(frozen=True)
class Tree:
    """One directory of the store that is made from pinned files.

    Attributes:
        kind: For example `cuda-13.0` or `torch-2.10-stable`.
        title: The name in messages, for example `CUDA 13.0`.
        platform: `any` if it is the same on all platforms.
    """

    role: TreeRole
    kind: str
    title: str
    platform: str
    files: tuple[PinnedFile, ...]

    @property
    def identity(self) -> str:
        """Digest of the pinned content and the recipe, equal on every machine."""
        pinned = [RECIPE, self.kind, self.platform, [file.identity for file in self.files]]
        if self.role == "component":  # whose name says nothing of what is taken of a wheel
            pinned.append([file.take for file in self.files])
        return hashlib.sha256(json.dumps(pinned).encode()).hexdigest()

    @property
    def name(self) -> str:
        """The name in the store."""
        return f"{self.kind}-{self.platform}-{self.identity[:16]}"

    @property
    def download(self) -> int:
        """Bytes to download."""
        return sum(file.download for file in self.files)

    @property
    def unpacked(self) -> int:
        """Bytes of the files on disk."""
        return sum(file.unpacked for file in self.files)


def cuda_tree(cuda: CudaPin, platform: str) -> Tree:
    """Return the toolkit of a CUDA release. The lock must have the platform."""
    return Tree("compiler", f"cuda-{cuda.release}", f"CUDA {cuda.release}", platform, cuda.platforms[platform])


def clang_tree(clang: ClangPin, platform: str) -> Tree:
    """Return clang with its headers. The lock must have the platform."""
    major = clang.version.partition(".")[0]
    return Tree("compiler", f"clang-{major}", f"clang {major}", platform, clang.platforms[platform])


def libraries_tree(cuda: CudaPin, platform: str) -> Tree:
    """Return the headers of the libraries of a CUDA release. The lock must have the platform."""
    kind, title = f"cuda-libraries-{cuda.release}", f"CUDA {cuda.release} library headers"
    return Tree("libraries", kind, title, platform, cuda.libraries[platform])


def torch_tree(torch: TorchPin, platform: str, subset: Subset) -> Tree:
    """Return the headers of a Torch release. The lock must have the platform."""
    kind, title = f"torch-{torch.release}-{subset}", f"Torch {torch.release} headers ({subset})"
    return Tree("torch", kind, title, platform, (torch.platforms[platform][subset],))


def dependency_tree(pin: DependencyPin) -> Tree:
    """Return a header library."""
    return Tree("dependency", pin.name, f"CUTLASS {pin.version} headers", "any", pin.files)


def component_tree(pin: ComponentPin) -> Tree:
    """Return what the compiler of a back end needs besides itself."""
    return Tree("component", pin.name, pin.title, "any", pin.files)
