"""Unusual names of projects and sources, and a destination that is a link."""

from __future__ import annotations

from pathlib import Path

from tests.integration.build_command.conftest import (
    Copy,
    Run,
    replace,
    snapshot,
)
from tests.support.places import CPU, CUDA


def test_project_directories_may_have_any_name(copy_project: Copy, cache: Path, kernel_builder: Run) -> None:
    name = """it's "$HOME": a `name`; & {more}, 100%\nline gr\udcf6sser"""
    odd, plain = copy_project("stable-scale", name), copy_project("stable-scale", "plain")
    for directory in (odd, plain):
        done = kernel_builder(cache, "build", directory, "--variant", CPU, "--no-load")
        assert done.code == 0, done
    assert done.answer["steps"] == 0
    assert snapshot(odd / "build") == snapshot(plain / "build")


def test_unusual_names_of_sources_are_built(project: Path, cache: Path, kernel_builder: Run) -> None:
    for old, new in (("scale_cpu.cpp", "a b'$:,é;.cpp"), ("scale_cuda.cu", "it's a scale.cu")):
        replace(project / "build.toml", old, new)
        (project / "scale" / old).rename(project / "scale" / new)
    done = kernel_builder(cache, "build", project, "--variant", CPU, "--variant", CUDA, "--no-load")
    assert done.code == 0, done


def test_build_may_be_a_symbolic_link(copy_project: Copy, cache: Path, kernel_builder: Run, tmp_path: Path) -> None:
    project, elsewhere = copy_project("stable-scale"), tmp_path / "elsewhere" / "packages"
    elsewhere.parent.mkdir()
    (project / "build").symlink_to(elsewhere)
    done = kernel_builder(cache, "build", project, "--variant", CPU, "--no-load")
    assert done.code == 0, done
    assert (project / "build").readlink() == elsewhere
    assert (elsewhere / CPU / "metadata.json").is_file()
    assert [path.name for path in elsewhere.parent.iterdir()] == ["packages"]
