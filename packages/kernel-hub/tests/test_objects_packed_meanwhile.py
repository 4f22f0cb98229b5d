"""Reads of objects that git is moving from one place to another, as `git gc` and `git repack` do."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pygit2
import pytest

from kernel_hub.git.objects import FileChange, TreeEntry
from kernel_hub.git.repository import GitRepository

BLOB = str(pygit2.hash(b"content"))
READS: dict[str, Callable[[GitRepository, str], object]] = {
    "branch": lambda repository, _: repository.refs.resolve("main"),
    "files": lambda repository, tip: list(repository.trees.entries(tip, recursive=True, count=9)),
    "entry": lambda repository, tip: repository.trees.entry(tip, "folder/file"),
    "content": lambda repository, _: repository.trees.read(TreeEntry("folder/file", BLOB, is_folder=False)),
    "commits": lambda repository, tip: repository.history.commits(tip),
    "date": lambda repository, tip: repository.history.last_modified(tip),
    "changes": lambda repository, tip: repository.history.changed_files(tip),
}


@pytest.mark.parametrize("name", READS)
def test_an_object_that_is_not_found_is_looked_for_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "k.git"
    writer = GitRepository.create("a/k", path, private=False, author="a")
    change = FileChange("folder/file", writer.commits.write_blob(b"content"))
    writer.commits.create("main", [change], title="t", description="", author="a")
    tip = writer.refs.resolve("main")
    expected = READS[name](writer, tip)
    reader = GitRepository("a/k", path, lambda *_: nullcontext())  # which has read no object yet
    objects, away = path / "objects", path / "away"
    objects.rename(away)
    monkeypatch.setattr(time, "sleep", lambda _: away.exists() and away.rename(objects))
    assert READS[name](reader, tip) == expected
    assert objects.exists()  # the first attempt failed
