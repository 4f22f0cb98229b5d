"""Which commit last changed each file, as `git log` says, and how far back the Hub looks."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest

from kernel_hub.git import history as git_history
from kernel_hub.git.objects import FileChange
from kernel_hub.git.repository import GitRepository

FILES = ["README.md", "build/a/x.py", "build/a/y.py", "build/b/x.py", "build/b/deep/er/z.py"]


@pytest.fixture
def repository(tmp_path: Path) -> GitRepository:
    """A repository with 60 commits that change, delete and restore files."""
    created = GitRepository.create("a/k", tmp_path / "k.git", private=False, author="a")
    chosen = random.Random(0)
    present: set[str] = set()
    for number in range(60):
        path = FILES[number] if number < len(FILES) else chosen.choice(FILES[1:])
        removed = path in present and number < 50 and chosen.random() < 0.2
        blob = None if removed else created.commits.write_blob(f"{number}".encode())
        present.symmetric_difference_update({path} if removed or path not in present else set())
        created.commits.create("main", [FileChange(path, blob)], title=f"{number}", description="", author="a")
    return created


def test_the_last_changes_are_those_of_git_log(repository: GitRepository) -> None:
    tip = repository.refs.resolve("main")
    paths = [entry.path for entry in repository.trees.entries(tip, recursive=True)]
    assert len(paths) > 8
    changes = repository.history.last_changes(tip, paths)
    for path in paths:
        log = ["git", "-C", repository.path, "log", "-1", "--format=%H", tip, "--", path]
        assert changes[path].oid == subprocess.run(log, capture_output=True, text=True, check=True).stdout.strip()


def test_changes_that_are_far_back_are_left_out(repository: GitRepository, monkeypatch: pytest.MonkeyPatch) -> None:
    tip = repository.refs.resolve("main")
    monkeypatch.setattr(git_history, "_MOST_WORK", 300)
    changes = repository.history.last_changes(tip, FILES)
    assert "README.md" not in changes
    assert len(changes) >= 2
