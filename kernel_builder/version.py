"""The builder's version."""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("torch-kernel-builder")
except PackageNotFoundError:  # a source tree that is only on the import path, as in a Nix build
    VERSION = "0+unknown"
