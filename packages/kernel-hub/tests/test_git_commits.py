"""Commits to a git repository, without a server."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path

import pygit2
import pytest

from kernel_hub.git.objects import FileChange
from kernel_hub.git.repository import GitRepository
from kernel_hub.refusals import Refusal

pytestmark = pytest.mark.attack


@pytest.fixture
def repository(tmp_path: Path) -> GitRepository:
    """A repository without a server."""
    GitRepository.create("a/one", tmp_path / "one.git", private=True, author="a")
    return GitRepository("a/one", tmp_path / "one.git", lambda _: nullcontext(), lambda *_: None, tmp_path)


def write_blob(repository: GitRepository, content: bytes) -> str:
    return str(pygit2.Repository(str(repository.path)).create_blob(content))


def commit(repository: GitRepository, changes: list[FileChange]) -> str:
    return repository.commits.create("main", changes, title="t", description="", author="a")[0]


def test_a_commit_takes_time_in_proportion_to_its_changes(repository: GitRepository) -> None:
    blob = write_blob(repository, b"x")
    commit(repository, [FileChange(f"d{number}/f", blob) for number in range(25_000)])
    began = time.process_time()
    changes = [FileChange(f"d{number}", is_folder=True) for number in range(24_999)]
    oid = commit(repository, changes)
    assert time.process_time() - began < 6
    paths = [entry.path for entry in repository.revisions.entries(oid, recursive=True, count=100)]
    assert paths == [".gitattributes", "d24999", "d24999/f"]


def test_changes_of_a_commit_have_any_order(repository: GitRepository) -> None:
    blob = write_blob(repository, b"x")
    other = write_blob(repository, b"y")
    commit(repository, [FileChange("a/b/c", blob), FileChange("f", blob), FileChange("g/h", blob)])
    # A file becomes a folder and a folder a file, whichever change is named first.
    oid = commit(
        repository, [FileChange("f/x", blob), FileChange("f"), FileChange("g", blob), FileChange("g", is_folder=True)]
    )
    entries = repository.revisions.entries(oid, recursive=True, count=100)
    listed = {entry.path for entry in entries if not entry.is_folder}
    assert listed == {".gitattributes", "a/b/c", "f/x", "g"}
    oid = commit(repository, [FileChange("a/b/c", other), FileChange("a/d", blob)])
    assert repository.revisions.entry(oid, "a/b/c").oid == other
    for changes, message in (
        ([FileChange("a", blob)], "both a file and a folder"),
        ([FileChange("n", blob), FileChange("n/m", blob)], "both a file and a folder"),
        ([FileChange("none")], "there is no such file"),
        ([FileChange("a")], "there is no such file"),
        ([FileChange("none", is_folder=True)], "there is no such folder"),
        ([FileChange("g", is_folder=True)], "there is no such folder"),
        ([FileChange("git~1", blob)], "git reserves it"),
    ):
        with pytest.raises(Refusal, match=message):
            commit(repository, changes)
    oid = commit(repository, [FileChange("a", is_folder=True)])
    assert repository.revisions.find(oid, "a") is None
