"""Compilers, headers and libraries for a variant, from pinned wheels or from the user's system."""

from kernel_builder.toolchain.toolchains import Toolchains
from kernel_builder.toolchain.tools import CudaToolkit, HeaderLibrary, HostCompiler, Obstacle, Subset, TorchHeaders

__all__ = [
    "CudaToolkit",
    "HeaderLibrary",
    "HostCompiler",
    "Obstacle",
    "Subset",
    "Toolchains",
    "TorchHeaders",
]
