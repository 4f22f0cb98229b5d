"""Unusual names of projects and sources, and destinations that are links, files or not writable."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.build_command.conftest import (
    Copy,
    Run,
    assert_refused,
    replace,
    snapshot,
    untouched,
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


def test_unusual_names_of_sources_are_built_or_refused(project: Path, cache: Path, kernel_builder: Run) -> None:
    """nvcc passes names to a shell, so the builder refuses names with characters that the shell would expand."""
    for old, new in (("scale_cpu.cpp", "a b'$:,é;.cpp"), ("scale_cuda.cu", "it's a scale.cu")):
        replace(project / "build.toml", old, new)
        (project / "scale" / old).rename(project / "scale" / new)
    done = kernel_builder(cache, "build", project, "--variant", CPU, "--variant", CUDA, "--no-load")
    assert done.code == 0, done
    replace(project / "build.toml", "it's a scale.cu", "$(touch owned).cu")
    (project / "scale" / "it's a scale.cu").rename(project / "scale" / "$(touch owned).cu")
    with untouched(project):
        done = kernel_builder(cache, "build", project, "--variant", CUDA)
    assert_refused(
        done, 2, "ConfigError", where="[kernel.scale_cuda] src", message="nvcc cannot compile", hint="rename the file"
    )


@pytest.mark.parametrize("name", ["`touch owned`", "a,b"])
def test_directories_of_headers_mean_nothing_to_the_shell_of_nvcc(
    project: Path, cache: Path, kernel_builder: Run, name: str
) -> None:
    (project / name).mkdir()
    replace(project / "build.toml", 'language = "cpp-cuda"', f'language = "cpp-cuda"\ninclude = ["""{name}"""]')
    with untouched(project):
        done = kernel_builder(cache, "build", project, "--variant", CUDA)
    assert_refused(
        done, 2, "ConfigError", where="[kernel.scale_cuda] include", message="nvcc cannot compile", hint="rename"
    )


def test_a_destination_that_is_a_file_is_refused(project: Path, cache: Path, kernel_builder: Run) -> None:
    place = project / "packages"
    place.write_text("mine")
    with untouched(project):
        done = kernel_builder(cache, "build", project, "--variant", CPU, "--no-load", "--out", place)
    assert_refused(done, 6, "PackageError", where=str(place), message="is a file", hint="--out")
    assert done.answer["hint"]


def test_a_destination_that_cannot_be_written_is_refused(
    project: Path, cache: Path, kernel_builder: Run, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with untouched(project):
        done = kernel_builder(
            cache, "build", project, "--variant", CPU, "--no-load", "--out", tmp_path / "file" / "out"
        )
    assert_refused(done, 6, "PackageError", where=str(tmp_path / "file"), message="cannot be written", hint="--out")


def test_build_may_be_a_symbolic_link(copy_project: Copy, cache: Path, kernel_builder: Run, tmp_path: Path) -> None:
    project, elsewhere = copy_project("stable-scale"), tmp_path / "elsewhere" / "packages"
    elsewhere.parent.mkdir()
    (project / "build").symlink_to(elsewhere)
    done = kernel_builder(cache, "build", project, "--variant", CPU, "--no-load")
    assert done.code == 0, done
    assert (project / "build").readlink() == elsewhere
    assert (elsewhere / CPU / "metadata.json").is_file()
    assert [path.name for path in elsewhere.parent.iterdir()] == ["packages"]
