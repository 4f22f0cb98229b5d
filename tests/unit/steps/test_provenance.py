"""The commit that packages record for their sources."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from kernel_builder.config.project_files import read_project
from kernel_builder.steps.provenance import provenance
from tests.support.git import git
from tests.support.places import PROJECTS

pytestmark = pytest.mark.attack


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository whose kernel has its device code by a link to a link."""
    project = tmp_path / "kernels" / "stable-scale"
    shutil.copytree(PROJECTS / "stable-scale", project, ignore=shutil.ignore_patterns("build"))
    (project / "scale").rename(tmp_path / "shared")
    (tmp_path / "kernels" / "scale").symlink_to("../shared")
    (project / "scale").symlink_to("../scale")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "First")
    return tmp_path


def recorded(repository: Path) -> Any:
    return provenance(read_project(repository / "kernels" / "stable-scale"), ["scale/scale_cpu.cpp"])["kernel"]


def test_the_commit_is_recorded(repository: Path) -> None:
    commit = git(repository, "rev-parse", "HEAD")
    (repository / "unrelated").touch()
    assert recorded(repository) == {"commit": commit, "dirty": False}


@pytest.mark.parametrize("name", ["shared/scale_cpu.cpp", "kernels/stable-scale/torch-ext/stable_scale/__init__.py"])
def test_a_changed_file_is_seen_through_links(repository: Path, name: str) -> None:
    with (repository / name).open("a") as stream:
        stream.write("\n")
    assert recorded(repository)["dirty"]


@pytest.mark.parametrize("name", ["kernels/scale", "kernels/stable-scale/scale"])
def test_a_changed_link_is_seen(repository: Path, name: str) -> None:
    """Though the files that it leads to are those of a commit."""
    shutil.copytree(repository / "shared", repository / "other")
    git(repository, "add", "other")
    git(repository, "commit", "--quiet", "--message", "Second")
    (repository / name).unlink()
    (repository / name).symlink_to(repository / "other")
    assert recorded(repository)["dirty"]


def test_a_header_that_no_commit_has_is_seen(repository: Path) -> None:
    project = repository / "kernels" / "stable-scale"
    (project / "scale" / "rates.h").write_text("#define RATE 2\n")
    described = provenance(read_project(project), ["scale/scale_cpu.cpp", "scale/rates.h"])
    assert described["kernel"]["dirty"]


def test_files_of_a_submodule_are_compared_with_its_commit(repository: Path, tmp_path_factory: Any) -> None:
    library = tmp_path_factory.mktemp("library")
    git(library, "init", "--quiet")
    (library / "rates.h").write_text("#define RATE 2\n")
    git(library, "add", ".")
    git(library, "commit", "--quiet", "--message", "First")
    project = repository / "kernels" / "stable-scale"
    git(repository, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(library), "third")
    (project / "third").symlink_to("../../third")
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "--message", "Second")

    def is_dirty() -> Any:
        return provenance(read_project(project), ["third/rates.h"])["kernel"]["dirty"]

    assert not is_dirty()
    (repository / "third" / "rates.h").write_text("#define RATE 3\n")
    assert is_dirty()
