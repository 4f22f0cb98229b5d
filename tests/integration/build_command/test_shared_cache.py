"""KERNEL_BUILDER_SHARED_CACHE: a second cache, which builds read and never write."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.integration.build_command.conftest import Copy, NewCache, Run, snapshot, untouched
from tests.support.places import CPU


def test_outputs_are_copied_instead_of_compiled_unless_they_are_damaged(
    copy_project: Copy, new_cache: NewCache, kernel_builder: Run
) -> None:
    shared, first = new_cache("shared"), copy_project("stable-scale", "first")
    assert kernel_builder(shared, "build", first, "--variant", CPU, "--no-load").code == 0

    def build(name: str) -> tuple[int, int]:
        project = copy_project("stable-scale", name)
        options = ("--variant", CPU, "--no-load")
        with untouched(shared / "objects"):
            done = kernel_builder(
                new_cache(f"{name}-cache"), "build", project, *options, KERNEL_BUILDER_SHARED_CACHE=str(shared)
            )
        assert snapshot(project / "build") == snapshot(first / "build")
        return done.answer["compiles"], done.answer["steps"]

    assert build("second") == (0, 0)
    shutil.rmtree(shared / "binaries")
    damaged, without_digest = sorted((shared / "objects").glob("*/*.o"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    without_digest.with_name(f"{without_digest.name}.sha256").unlink()
    assert build("third") == (2, 3)


def test_a_missing_directory_is_a_warning(project: Path, cache: Path, kernel_builder: Run, tmp_path: Path) -> None:
    missing = tmp_path / "nothing"
    variables = {"KERNEL_BUILDER_SHARED_CACHE": str(missing)}
    done = kernel_builder(cache, "build", project, "--variant", CPU, "--no-load", **variables)
    assert done.code == 0, done
    assert f"warning: the shared cache {missing} is not used: its directory `objects` cannot be read" in done.stderr
