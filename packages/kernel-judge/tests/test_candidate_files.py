"""The digest and the copy of a candidate, without the files that tools leave in a project."""

from __future__ import annotations

from pathlib import Path

from kernel_judge.judge.candidate_files import candidate_digest, copy_candidate


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
