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


def test_changes_are_seen_through_links(repository: Path) -> None:
    """Also that of a link, though the files that it leads to are those of a commit."""
    project = repository / "kernels" / "stable-scale"

    def recorded(*files: str) -> Any:
        return provenance(read_project(project), ["scale/scale_cpu.cpp", *files])["kernel"]

    shutil.copytree(repository / "shared", repository / "other")
    git(repository, "add", "other")
    git(repository, "commit", "--quiet", "--message", "Second")
    (repository / "unrelated").touch()
    committed = {"commit": git(repository, "rev-parse", "HEAD"), "dirty": False}
    assert recorded() == committed
    for name in ("shared/scale_cpu.cpp", "kernels/stable-scale/torch-ext/stable_scale/__init__.py"):
        with (repository / name).open("a") as stream:
            stream.write("\n")
        assert recorded()["dirty"], name
        git(repository, "checkout", "--", ".")
    for name in ("kernels/scale", "kernels/stable-scale/scale"):
        (repository / name).unlink()
        (repository / name).symlink_to(repository / "other")
        assert recorded()["dirty"], name
        git(repository, "checkout", "--", ".")
    assert recorded() == committed
    (project / "scale" / "rates.h").write_text("#define RATE 2\n")
    assert recorded("scale/rates.h")["dirty"], "a header that no commit has"


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
