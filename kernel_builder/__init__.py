"""Build, check and publish compute kernels for PyTorch."""

__version__: str


def __getattr__(name: str) -> str:
    """Look `__version__` up when it is first read: importing `importlib.metadata` takes 25 ms.

    setuptools-scm derives the version from the git tag when the package is built or installed. A source tree that is
    only on the import path, as in a Nix build, has none.
    """
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        release = version("torch-kernel-builder")
    except PackageNotFoundError:
        release = "0+unknown"
    globals()["__version__"] = release
    return release
