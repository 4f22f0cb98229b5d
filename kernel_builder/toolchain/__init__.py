"""Compilers, headers and libraries for a variant, as files with identities, wherever they come from."""

from kernel_builder.progress import Progress, Silent, shown
from kernel_builder.toolchain.toolchains import Toolchains
from kernel_builder.toolchain.tools import CudaToolkit, HostCompiler, Obstacle, Subset, TorchHeaders

__all__ = [
    "CudaToolkit",
    "HostCompiler",
    "Obstacle",
    "Progress",
    "Silent",
    "Subset",
    "Toolchains",
    "TorchHeaders",
    "shown",
]
