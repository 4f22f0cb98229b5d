"""Compilers, headers and libraries for a variant, from pinned wheels or from the user's system."""

from kernel_builder.backends.cuda import CudaToolkit
from kernel_builder.toolchain.toolchains import Toolchains
from kernel_builder.toolchain.tools import (
    Clang,
    ComponentFiles,
    HeaderLibrary,
    HostCompiler,
    Obstacle,
    Subset,
    TorchHeaders,
)

__all__ = [
    "Clang",
    "ComponentFiles",
    "CudaToolkit",
    "HeaderLibrary",
    "HostCompiler",
    "Obstacle",
    "Subset",
    "Toolchains",
    "TorchHeaders",
]
