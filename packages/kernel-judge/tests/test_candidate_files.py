"""The digest and the copy of a candidate, without the files that tools leave in a project."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_format.errors import ConfigError
from kernel_judge.judge.candidate import frozen, read_candidate
from kernel_judge.judge.candidate_files import candidate_digest, copy_candidate
from kernel_judge.search.workspace import Workspace
from kernel_tasks import read_task
from tests.support.files import write_files

TASK = Path(__file__).parent / "tasks" / "softmax.py"
SPARSE = 1 << 40  # bytes
pytestmark = pytest.mark.attack


def test_what_tools_leave_behind_is_no_part_of_a_candidate(tmp_path: Path) -> None:
    project = tmp_path / "kernel"
    write_files(project, {"build.toml": "[general]\n", "torch-ext/own/__init__.py": "x = 1\n"})
    before = candidate_digest(project)
    left = ("build/variant/own.so", "torch-ext/own/__pycache__/x.pyc", ".venv/bin/python", ".pytest_cache/v")
    write_files(project, left)
    assert candidate_digest(project) == before

    copy_candidate(project, tmp_path / "copy")
    files = sorted(path.relative_to(tmp_path / "copy").as_posix() for path in (tmp_path / "copy").rglob("*.*"))
    assert files == ["build.toml", "torch-ext/own/__init__.py"]
    assert candidate_digest(tmp_path / "copy") == before

    (project / "torch-ext" / "own" / "__init__.py").rename(project / "torch-ext" / "own" / "moved.py")
    assert candidate_digest(project) != before


@pytest.mark.parametrize("linked", ["candidate.py", "kernel/torch-ext/secret.py", "kernel/torch-ext", "kernel/build"])
def test_no_link_of_a_candidate_is_followed(linked: str, tmp_path: Path) -> None:
    """An agent's candidate links to a file that the agent may not read, but the user."""
    secret = tmp_path / "private" / "inner" / "secret.py"
    write_files(secret.parent, {secret.name: "class ModelNew: token = 'hf_secret'\n"})
    workspace = Workspace(tmp_path / "run", 1, 1)
    project = write_files(workspace.directory / "kernel", {"build.toml": "[general]\n"})
    (workspace.run / "given" / "kernel").mkdir(parents=True)
    link = workspace.directory / linked
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(secret if link.suffix else secret.parent)
    (project / "candidate.py").write_text("class ModelNew: pass\n")
    workspace.freeze()
    (tmp_path / "judged").mkdir()
    with pytest.raises(ConfigError), frozen(project, with_build=True) as copy:  # or of the build.toml
        assert not (copy / "build").exists()
        read_candidate(copy, read_task(TASK)).prepared(tmp_path / "judged", "cpu")
    copies = [*(tmp_path / "judged").rglob("*"), *workspace.frozen.parent.rglob("*")]
    assert not [path for path in copies if path.is_file() and "hf_secret" in path.read_text()]


@pytest.mark.parametrize("kind", ["sparse", "files", "deep", "solution"])
def test_a_candidate_beyond_a_limit_is_refused_before_it_is_written(kind: str, tmp_path: Path) -> None:
    workspace = Workspace(tmp_path / "run", 1, 1)
    project = workspace.directory / "kernel"
    folder = project.joinpath(*["d"] * 40) if kind == "deep" else project
    (workspace.run / "given" / "kernel").mkdir(parents=True)
    write_files(folder, {"candidate.py": "class ModelNew: pass\n"})
    if kind == "files":
        write_files(project, map(str, range(10_001)))
    large = project / ("solution.json" if kind == "solution" else "weights")
    with large.open("wb") as file:
        file.truncate(SPARSE if kind in ("sparse", "solution") else 1)
    candidate = large if kind == "solution" else project
    limits = "cannot be copied: .*a candidate has at most 10,000 files and directories, 256 MiB"
    with pytest.raises(ConfigError, match=limits), frozen(candidate):
        pass
    assert workspace.freeze() is None and not workspace.frozen.parent.exists()
