"""Kernels that depend on other kernels, on several versions of one, and on each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_format.errors import ConfigError
from tests.integration.build_command.conftest import Copy, Run, replace

BASE = "org/stable-scale"
TOP = """\
from kernels import get_kernel_dep

base = get_kernel_dep("org/stable-scale")


def doubled(x):
    return base.scaled(x, 2.0)
"""


@pytest.fixture
def cache(shared_cache: Path) -> Path:
    return shared_cache


def write_top(directory: Path, *depends: str) -> Path:
    """Write a project of Python alone that depends on version 1 of other kernels."""
    package = directory / "torch-ext" / directory.name
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(TOP)
    listed = ", ".join(f'{{ repo-id = "{depend}", version = 1 }}' for depend in depends)
    (directory / "build.toml").write_text(
        f'[general]\nname = "{directory.name}"\nversion = 1\nedition = 5\nlicense = "mit"\nbackends = ["cpu"]\n'
        f'kernel-depends = [{listed}]\nhub.repo-id = "org/{directory.name}"\n[torch-noarch]\n'
    )
    return directory


def test_a_kernel_that_depends_on_compiled_ones(copy_project: Copy, kernel_builder: Run, tmp_path: Path) -> None:
    """The ops of a dependency are not the project's. It may be a project of the command, or in LOCAL_KERNELS."""
    versions = []
    for version in (1, 2):
        versions.append(copy_project("stable-scale", f"scale-v{version}"))
        replace(versions[-1] / "build.toml", "version = 1", f"version = {version}")
    top = write_top(tmp_path / "top", BASE)

    (package,) = kernel_builder.build(top, HF_HUB_CACHE=str(tmp_path / "empty"))["packages"]
    reason = package["skipped-checks"]["load"]
    assert "which cannot be loaded here: build its project in the same command" in reason

    together = kernel_builder.build(top, *versions, "--backend", "cpu")["packages"]
    assert [(built["project"], "load" in built["passed-checks"]) for built in together] == [
        ("stable-scale (scale-v1)", True),
        ("stable-scale (scale-v2)", True),
        ("top", True),
    ]
    assert "ops" in together[2]["passed-checks"]

    (top / "torch-ext" / "top" / "more.py").write_text("")
    (local,) = kernel_builder.build(top, "--sandbox", "off", LOCAL_KERNELS=f"{BASE}={versions[0] / 'build'}")[
        "packages"
    ]
    assert local["variant"] == "torch-cpu" and "load" in local["passed-checks"]


def test_kernels_that_depend_on_each_other(kernel_builder: Run, tmp_path: Path) -> None:
    one, two = write_top(tmp_path / "one", "org/two"), write_top(tmp_path / "two", "org/one")
    expected = {"where": "kernel-depends", "message": "the kernels depend on each other: ", "hint": "remove one"}
    kernel_builder.refuse(one, two, "--no-load", error=ConfigError, **expected)
