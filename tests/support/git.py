"""Git in repositories of tests."""

from __future__ import annotations

import subprocess
from pathlib import Path

ANY = "safe.directory=*"  # of another user


def git(repository: Path, *arguments: str, text: str = "") -> str:
    """Run git in a repository with an input, as an author of the tests' own, and return its output."""
    settings = ("user.name=me", "user.email=me@localhost", "init.defaultBranch=main", "commit.gpgsign=false", ANY)
    command = ["git", "-C", str(repository), *(word for setting in settings for word in ("-c", setting)), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, input=text).stdout.strip()


def commit_all(repository: Path, message: str = "First") -> None:
    """Commit all files of a directory, which becomes a repository if it is none."""
    for command in (("init", "--quiet"), ("add", "--all"), ("commit", "--quiet", "--message", message)):
        git(repository, *command)
