"""The digest and the copy of a candidate, without the files that tools leave in a project."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_format.errors import ConfigError
from kernel_judge.judge.candidate import frozen, read_candidate
from kernel_judge.judge.candidate_files import candidate_digest, copy_candidate
from kernel_judge.search.workspace import Workspace
from kernel_tasks import read_task

TASK = Path(__file__).parent / "tasks" / "softmax.py"
pytestmark = pytest.mark.attack


def test_what_tools_leave_behind_is_no_part_of_a_candidate(tmp_path: Path) -> None:
    project = tmp_path / "kernel"
    (project / "torch-ext" / "own").mkdir(parents=True)
    (project / "build.toml").write_text("[general]\n")
    (project / "torch-ext" / "own" / "__init__.py").write_text("x = 1\n")
    before = candidate_digest(project)
    for left in ("build/variant/own.so", "torch-ext/own/__pycache__/x.pyc", ".venv/bin/python", ".pytest_cache/v"):
        (project / left).parent.mkdir(parents=True, exist_ok=True)
        (project / left).touch()
    assert candidate_digest(project) == before

    copy_candidate(project, tmp_path / "copy")
    files = sorted(path.relative_to(tmp_path / "copy").as_posix() for path in (tmp_path / "copy").rglob("*.*"))
    assert files == ["build.toml", "torch-ext/own/__init__.py"]
    assert candidate_digest(tmp_path / "copy") == before

    (project / "torch-ext" / "own" / "__init__.py").rename(project / "torch-ext" / "own" / "moved.py")
    assert candidate_digest(project) != before


@pytest.mark.parametrize("linked", ["candidate.py", "kernel/torch-ext/secret.py", "kernel/torch-ext"])
def test_no_link_of_a_candidate_is_followed(linked: str, tmp_path: Path) -> None:
    """An agent's candidate links to a file that the agent may not read, but the user."""
    private = tmp_path / "private"
    (private / "inner").mkdir(parents=True)
    secret = private / "inner" / "secret.py"
    secret.write_text("class ModelNew: token = 'hf_secret'\n")
    workspace = Workspace(tmp_path / "run", 1, 1)
    project = workspace.directory / "kernel"
    (project / "csrc").mkdir(parents=True)
    (project / "build.toml").write_text("[general]\n")
    (workspace.run / "given" / "kernel").mkdir(parents=True)
    link = workspace.directory / linked
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(secret if link.suffix else secret.parent)
    (project / "candidate.py").write_text("class ModelNew: pass\n")
    workspace.freeze()
    (tmp_path / "judged").mkdir()
    with pytest.raises(ConfigError), frozen(project, read_task(TASK)) as copy:  # of the build.toml, after the copy
        read_candidate(copy, read_task(TASK)).prepared(tmp_path / "judged", "cpu")
    copies = [*(tmp_path / "judged").rglob("*"), *workspace.frozen.parent.rglob("*")]
    assert not [path for path in copies if path.is_file() and "hf_secret" in path.read_text()]
