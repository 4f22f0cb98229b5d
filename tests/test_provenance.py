"""What packages record of the commit of their sources."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kernel_builder.build.provenance import provenance
from kernel_builder.config.project_files import read_project

from .conftest import PROJECTS


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


def git(repository: Path, *arguments: str) -> str:
    command = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@example.org", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def recorded(repository: Path) -> Any:
    return provenance(read_project(repository / "kernels" / "stable-scale"))["kernel"]


def test_the_commit_is_recorded(repository: Path) -> None:
    commit = git(repository, "rev-parse", "HEAD").strip()
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
