"""The files that a search gives to its agents: the task, a new project, the contexts."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from kernel_builder.api import create_project
from kernel_format.errors import ConfigError
from kernel_judge.search.search_request import PROFILE, REFERENCE, SKILL, SearchRequest
from kernel_judge.search.workspace import PROJECT

_PROFILE_SECONDS = 600


def kernel_name(task: str) -> str:
    """Return a name for the kernel of a task: small letters, digits and dashes, a letter first."""
    words = re.sub(r"[^a-z0-9]+", "-", task.lower()).strip("-")
    return words if re.fullmatch(r"[a-z][-a-z0-9]*[a-z0-9]", words) else f"kernel-{words}".rstrip("-")


def task_path(run: Path) -> Path:
    """Return the copy of the task in the directory of a search."""
    entries = sorted((run / "given" / "task").iterdir(), key=lambda path: path.suffix == ".toml")
    return entries[0]  # a directory, or a problem file that may have settings beside it


def prepare(request: SearchRequest, backends: Sequence[str]) -> None:
    """Create `given/` in the directory of a search, unless an earlier start of the search has created it.

    Raises:
        ConfigError: If a context lacks its files, or the reference cannot be run.
    """
    given = request.run / "given"
    if given.is_dir():
        return
    staged = request.run / "given.new"
    shutil.rmtree(staged, ignore_errors=True)
    settings = request.task.with_suffix(".toml")
    _copy([request.task, *([settings] if request.task.is_file() and settings.is_file() else [])], staged / "task")
    assert request.repo_id
    create_project(staged / PROJECT, request.repo_id, backends, license_name="apache-2.0")
    wanted = {name for context in request.contexts for name in context}
    if SKILL in wanted:
        skill = request.skill
        assert skill
        if not (skill / "SKILL.md").is_file():
            raise ConfigError(
                "there is no SKILL.md", where=str(skill), hint="name the directory of a skill: --skill DIR"
            )
        _copy(skill.iterdir(), staged / "context" / SKILL)
    if REFERENCE in wanted and request.references:
        _copy(request.references, staged / "context" / REFERENCE)
    elif REFERENCE in wanted:
        _observe(request.task, staged / "context" / REFERENCE, "code")
    if PROFILE in wanted:
        _observe(request.task, staged / "context" / PROFILE, "profile")
    staged.rename(given)


def _copy(sources: Iterable[Path], directory: Path) -> None:
    directory.mkdir(parents=True)
    for source in sources:
        if source.is_dir():
            shutil.copytree(source, directory / source.resolve().name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(source, directory / source.name)


def _observe(task: Path, directory: Path, kind: str) -> None:
    """Run the reference in another process, and save its generated code or its profile."""
    directory.mkdir(parents=True)
    command = [sys.executable, "-m", "kernel_judge.judge.reference_profile", kind, str(task), str(directory)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=_PROFILE_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"the reference did not end in {_PROFILE_SECONDS} s", where=str(task), hint="leave out --context"
        ) from error
    if done.returncode:
        message = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ConfigError(f"the reference cannot be run: {message}", where=str(task), hint=json.dumps(command))
