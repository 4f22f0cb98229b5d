"""Which files of a project are published."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kernel_builder.hub.project_sources import published_files


def test_nothing_of_the_repositorys_configuration_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project, other = tmp_path / "project", tmp_path / "other"
    monkeypatch.delenv("GIT_DIR", raising=False)
    for directory in (project, other):
        subprocess.run(["git", "init", "--quiet", directory], check=True)
        (directory / f"{directory.name}.txt").write_text("")
        subprocess.run(["git", "-C", directory, "add", "."], check=True)
    hook = project / "hook.sh"
    hook.write_text(f"#!/bin/sh\n: > {tmp_path}/ran\n")
    hook.chmod(0o755)
    subprocess.run(["git", "-C", project, "config", "core.fsmonitor", hook], check=True)
    (project / ".git" / "info" / "exclude").write_text("private.txt\n")
    (project / "private.txt").write_text("")
    assert set(published_files(project)) == {"hook.sh", "project.txt"}
    assert not (tmp_path / "ran").exists()
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    assert set(published_files(project)) == {"hook.sh", "project.txt"}
