"""Compilers, headers and libraries for a variant, from pinned wheels or from the user's system."""

from kernel_builder.toolchain.toolchains import Toolchains

__all__ = ["Toolchains"]
