"""Build, check and publish compute kernels for PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernel_builder.develop.inline import load as load

__version__: str


def __getattr__(name: str) -> Any:
    """Look `load` and `__version__` up when they are first read: importing `importlib.metadata` takes 25 ms.

    setuptools-scm derives the version from the git tag when the package is built or installed. A source tree that is
    only on the import path, as in a Nix build, has none.
    """
    if name == "load":
        from kernel_builder.develop.inline import load

        return load
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        release = version("torch-kernel-builder")
    except PackageNotFoundError:
        release = "0+unknown"
    globals()["__version__"] = release
    return release
