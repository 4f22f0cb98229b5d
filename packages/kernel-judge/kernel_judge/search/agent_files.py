"""The files that a search gives to its agents: the task, a new project, the contexts."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kernel_builder.api import create_project
from kernel_format.errors import ConfigError
from kernel_format.files import replaced_directory
from kernel_judge.judge.candidate_files import copy_candidate
from kernel_judge.search.search_request import REFERENCE, SKILL, SearchRequest
from kernel_judge.search.workspace import PROJECT
from kernel_tasks import Task


def repo_id(task: Task) -> str:
    """Return a repository for the kernel of a task, whose name has small letters, digits and dashes, a letter first."""
    words = re.sub(r"[^a-z0-9]+", "-", task.name.lower()).strip("-")
    name = words if re.fullmatch(r"[a-z][-a-z0-9]*[a-z0-9]", words) else f"kernel-{words}".rstrip("-")
    return f"local/{name}"


def prepare(request: SearchRequest, task: Task, backends: Sequence[str]) -> None:
    """Create `given/` in the directory of a search, unless an earlier start of the search has created it."""
    given = request.run / "given"
    if given.is_dir():
        return
    wanted = {name for context in request.contexts for name in context}
    if REFERENCE in wanted and not request.references:
        raise ConfigError("no file is named", where="--context reference", hint="add --reference FILE")
    with replaced_directory(given) as staged:
        task.save(staged / "task")
        create_project(staged / PROJECT, repo_id(task), backends, license_name="apache-2.0")
        if SKILL in wanted:
            (staged / "context").mkdir()
            copy_candidate(request.skill, staged / "context" / SKILL)  # an agent may have written it
        if REFERENCE in wanted:
            (staged / "context" / REFERENCE).mkdir(parents=True)
        for source in request.references if REFERENCE in wanted else ():
            for path in (source, *source.rglob("*")):
                if path.is_symlink():
                    raise ConfigError("is a symbolic link", where=str(path), hint="name the file itself")
            copy_candidate(source.resolve(), staged / "context" / REFERENCE / source.resolve().name)
