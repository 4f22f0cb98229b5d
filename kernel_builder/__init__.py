"""Build, check and publish compute kernels for PyTorch."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernel_builder.develop.inline import load as load

try:
    __version__ = version("torch-kernel-builder")
except PackageNotFoundError:  # a source tree that is only on the import path, as in a Nix build
    __version__ = "0+unknown"


def __getattr__(name: str) -> Any:
    """Look `load` up when it is first read: it imports Torch."""
    if name != "load":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kernel_builder.develop.inline import load

    return load
