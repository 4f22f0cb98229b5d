"""Which files a `.gitignore` excludes from an upload, by git's own rules."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pygit2


def ignored(rules: bytes, paths: Sequence[str]) -> set[str]:
    """Return the paths that a `.gitignore` at the top of a repository excludes."""
    if not rules.strip():
        return set()
    with tempfile.TemporaryDirectory(prefix="kernel-builder-") as folder:
        git = pygit2.init_repository(folder)
        git.config["core.excludesfile"] = os.devnull  # not the rules of the operator
        Path(folder, ".git/info/exclude").unlink(missing_ok=True)
        Path(folder, ".gitignore").write_bytes(rules)
        return {path for path in paths if git.path_is_ignored(path)}
