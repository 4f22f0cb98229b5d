"""Where a package comes from: the builder's version, and the commits of builder and sources."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import kernel_builder
from kernel_builder.config.project import Project


@dataclass(frozen=True)
class GitState:
    """The commit that sources came from, and whether any of them differs from it."""

    commit: str
    dirty: bool


def git_state(directory: Path, files: Sequence[str] = (".",)) -> GitState | None:
    """Return the git state of some files of a directory, or None without git, a repository or a commit.

    A named file that git does not track counts as a difference: no commit has it.
    """

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(directory), *arguments]
        environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        except FileNotFoundError:
            return None
        return done.stdout if done.returncode == 0 else None

    commit = git("rev-parse", "--verify", "HEAD")
    status = git("status", "--porcelain", "--ignored", "--", *files) if commit else None
    if commit is None or status is None:
        return None
    return GitState(commit.strip(), bool(status.strip()))


def builder_origin(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a package records of its builder.

    Args:
        state: `commit` and `dirty` of a builder in a git checkout, else empty.
    """
    # The public client wants a version. That of an editable install is the version it was installed at, and depends on
    # the tags that a clone has, so a checkout records its commit as the version: equal sources give equal bytes.
    version = f"0+g{state['commit'][:12]}" if state else kernel_builder.__version__
    return {"version": version, **state}


def provenance(project: Project) -> dict[str, Any]:
    """Return what `metadata.json` records of the builder and of the files that a project is built from."""
    here = Path(kernel_builder.__file__).parent
    own = git_state(here, (".", ":(exclude,glob)**/__pycache__/**")) if (here.parent / ".git").exists() else None
    recorded: dict[str, Any] = {"kernel-builder": builder_origin(asdict(own) if own else {})}
    inputs = {"build.toml", *(str(path.relative_to(project.root)) for _, path in project.python_files)}
    for part in [project.framework, *project.kernels]:
        inputs.update(getattr(part, "src", ()))
    kernel = git_state(project.root, sorted({path for name in inputs for path in _git_paths(project.root / name)}))
    if kernel:
        recorded["kernel"] = asdict(kernel)
    return recorded


def _git_paths(path: Path) -> list[str]:
    """Return what git tracks of a file: the file itself, and the symbolic links that lead to it."""
    for part in (*reversed(path.parents), path):
        if part.is_symlink():
            target = Path(os.path.normpath(part.parent / part.readlink()))
            return [str(part), *_git_paths(target / path.relative_to(part))]
    return [str(path)]
