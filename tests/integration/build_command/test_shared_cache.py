"""KERNEL_BUILDER_SHARED_CACHE: a second cache, which builds read and never write."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.integration.build_command.conftest import Copy, NewCache, Run, snapshot, untouched
from tests.support.places import CPU


@pytest.fixture
def shared(copy_project: Copy, new_cache: NewCache, kernel_builder: Run) -> Path:
    """Return a cache with the outputs of a project, whose packages are in `first`."""
    cache = new_cache("shared")
    project = copy_project("stable-scale", "first")
    done = kernel_builder(cache, "build", project, "--variant", CPU, "--no-load")
    assert done.code == 0, done
    return cache


def test_outputs_are_copied_instead_of_compiled(
    shared: Path, copy_project: Copy, cache: Path, kernel_builder: Run
) -> None:
    first, second = shared.parent / "first", copy_project("stable-scale", "second")
    with untouched(shared / "objects", shared / "binaries"):
        done = kernel_builder(
            cache, "build", second, "--variant", CPU, "--no-load", KERNEL_BUILDER_SHARED_CACHE=str(shared)
        )
    assert done.code == 0, done
    assert done.answer["steps"] == 0
    assert snapshot(second / "build") == snapshot(first / "build")


def test_a_damaged_output_is_ignored(shared: Path, copy_project: Copy, cache: Path, kernel_builder: Run) -> None:
    shutil.rmtree(shared / "binaries")
    damaged, without_digest = sorted((shared / "objects").glob("*/*.o"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    without_digest.with_name(f"{without_digest.name}.sha256").unlink()
    first, second = shared.parent / "first", copy_project("stable-scale", "second")
    variables = {"KERNEL_BUILDER_SHARED_CACHE": str(shared)}
    with untouched(shared / "objects"):
        done = kernel_builder(cache, "build", second, "--variant", CPU, "--no-load", **variables)
    assert (done.answer["compiles"], done.answer["steps"]) == (2, 3)
    assert snapshot(second / "build") == snapshot(first / "build")


def test_a_missing_directory_is_a_warning(project: Path, cache: Path, kernel_builder: Run, tmp_path: Path) -> None:
    missing = tmp_path / "nothing"
    variables = {"KERNEL_BUILDER_SHARED_CACHE": str(missing)}
    done = kernel_builder(cache, "build", project, "--variant", CPU, "--no-load", **variables)
    assert done.code == 0, done
    assert f"warning: the shared cache {missing} is not used: its directory `objects` cannot be read" in done.stderr
