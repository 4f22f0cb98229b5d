"""Compilers, headers and libraries for a variant, as files with identities, wherever they come from."""

from kernel_builder.toolchain.model import CudaToolkit, HostCompiler, Obstacle, Subset, TorchHeaders
from kernel_builder.toolchain.progress import Progress, Silent, shown
from kernel_builder.toolchain.toolchains import Toolchains

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
