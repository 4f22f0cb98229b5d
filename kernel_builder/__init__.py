"""Build, check and publish compute kernels for PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kernel_builder.version import VERSION as __version__

if TYPE_CHECKING:
    from kernel_builder.develop.inline import load as load

__all__ = ["__version__", "load"]


def __getattr__(name: str) -> Any:
    """Look `load` up when it is first read: it imports Torch."""
    if name != "load":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kernel_builder.develop.inline import load

    return load
