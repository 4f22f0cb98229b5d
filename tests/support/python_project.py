"""Projects of Python alone, for tests that need no compiler."""

from __future__ import annotations

from pathlib import Path

from tests.support.files import write_files
from tests.support.places import SOURCES


def write_project(directory: Path, python: str = "", *depends: str, owner: str = "org") -> Path:
    """Write a project with its directory's name, which depends on version 1 of other kernels of its owner."""
    listed = ", ".join(f'{{ repo-id = "{owner}/{name}", version = 1 }}' for name in depends)
    values = {"name": directory.name, "owner": owner, "depends": f"kernel-depends = [{listed}]\n" if depends else ""}
    init = f"torch-ext/{directory.name}/__init__.py"
    return write_files(directory, {init: python, "build.toml": SOURCES["python_build_toml"].format(**values)})
