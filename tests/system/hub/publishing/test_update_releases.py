"""The workflow that opens a pull request with new releases."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from .rehearsal import Rehearsal

_GH = """\
#!/bin/sh
echo "$GH_TOKEN $*" >> "$GH_LOG"
if [ "$2" != create ]; then exit; fi
if [ -e "$GH_LOG.open" ]; then exit 1; fi
: > "$GH_LOG.open"
"""


def git(directory: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", directory, *arguments], check=True, capture_output=True, text=True).stdout


def test_a_pull_request_is_opened_once_and_then_kept_up_to_date(tmp_path: Path) -> None:
    """GitHub's own command is imitated; git pushes to a repository beside the checkout."""
    for name in ("program", "temp"):
        (tmp_path / name).mkdir()
    (tmp_path / "program/gh").write_text(_GH)
    (tmp_path / "program/gh").chmod(0o755)
    log = tmp_path / "log"
    environment = {**os.environ, "GH_LOG": str(log), "PATH": f"{tmp_path}/program{os.pathsep}{os.environ['PATH']}"}
    git(tmp_path, "init", "--quiet", "--bare", "origin.git")
    checkout = tmp_path / "checkout"
    for content in ("", "2.16", "2.17"):
        if content:
            checkout.rename(tmp_path / f"before-{content}")
        git(tmp_path, "clone", "--quiet", "origin.git", "checkout")
        if not content:
            git(checkout, "switch", "--create", "main")
            (checkout / "matrix.toml").write_text("2.15\n")
            git(checkout, "add", ".")
            git(checkout, "-c", "user.name=a", "-c", "user.email=a@example.org", "commit", "--quiet", "-m", "First")
            git(checkout, "push", "--quiet", "origin", "main")
            git(tmp_path / "origin.git", "symbolic-ref", "HEAD", "refs/heads/main")
        else:
            (checkout / "matrix.toml").write_text(f"{content}\n")
        workflow = Rehearsal(checkout, {"github.token": "of-the-job"}, environment, "update-releases.yml")
        workflow.job("update", only="Open a pull request")
        if not content:
            assert not log.exists(), "nothing is new"
            continue
        assert git(tmp_path / "origin.git", "show", "update-releases:matrix.toml") == f"{content}\n"
        assert git(tmp_path / "origin.git", "rev-list", "--count", "main..update-releases").strip() == "1"
    title = "--head update-releases --title toolchain: take new releases of Torch, CUDA and clients"
    body = f"--body-file {tmp_path}/temp/changes.md"
    assert log.read_text().splitlines() == [
        "of-the-job auth setup-git",
        f"of-the-job pr create {title} {body}",
        "of-the-job auth setup-git",
        f"of-the-job pr create {title} {body}",
        f"of-the-job pr edit update-releases {body}",
    ]
