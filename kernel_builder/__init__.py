"""Build, check and publish compute kernels for PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernel_builder.develop.inline import load as load

__version__: str


def __getattr__(name: str) -> Any:
    """Look `load` and `__version__` up when they are first read."""
    if name == "load":
        from kernel_builder.develop.inline import load

        return load
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()["__version__"] = release = _version()
    return release


def _version() -> str:
    """Return the version, which setuptools-scm derives from the git tag when the package is built or installed.

    The directory of an installation's metadata has it in its name. Only where there is none beside the package is
    `importlib.metadata` asked, whose import takes 25 ms. A source tree that is only on the import path, as in a Nix
    build, has no version.
    """
    directories = [*Path(__file__).parents[1].glob("torch_kernel_builder-*.dist-info")]
    if len(directories) == 1:
        return directories[0].stem.partition("-")[2]
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("torch-kernel-builder")
    except PackageNotFoundError:
        return "0+unknown"
