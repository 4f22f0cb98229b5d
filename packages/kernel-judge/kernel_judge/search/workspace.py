"""The directories of a search: the files for all agents, and the workspace of each try.

RUN/log.jsonl               everything that has happened
RUN/given/                  the initial files of each workspace: task/, kernel/, context/
RUN/attempts/0001/1/workspace/   where the agent of try 1 of attempt 1 works
RUN/attempts/0001/1/candidate    a copy of its kernel, made after all of its processes ended
RUN/attempts/0001/1/agent.log    its output
RUN/best/                   the best kernel, as a project
"""

from __future__ import annotations

import json
import shlex
import shutil
import string
from collections.abc import Sequence
from pathlib import Path

from kernel_format.files import remove_tree
from kernel_judge.judge.candidate_files import candidate_digest, copy_candidate
from kernel_judge.judge.verdict import Verdict
from kernel_judge.search.search_request import PlannedAttempt, SearchRequest
from kernel_sandbox.programs import python_module
from kernel_tasks import Task

_TEMPLATES = Path(__file__).parent / "templates"
FILE, PROJECT = "candidate.py", "kernel"  # an agent writes one of them
PROMPT = "PROMPT.md"
_CONTEXTS = {
    "skill": "how kernels are written for this builder; start with `SKILL.md`.",
    "reference": "the same computation in another language.",
}


class Workspace:
    """The directory of one try; `run` is the search's, absolute."""

    def __init__(self, run: Path, attempt: int, number: int) -> None:
        self.run = run
        self.root = run / "attempts" / f"{attempt:04}" / str(number)
        self.directory = self.root / "workspace"
        self.log = self.root / "agent.log"

    def prepare(self, prompt: str, context: Sequence[str], judge: str, before: Path | None) -> None:
        """Make the workspace anew, with directories of `given/context` and the candidate of the try before."""
        remove_tree(self.root)
        given = self.run / "given"
        self.directory.mkdir(parents=True)
        for name in ("task", PROJECT, *(f"context/{name}" for name in context)):
            shutil.copytree(given / name, self.directory / name, symlinks=True)
        if before:
            copy_candidate(before, self.directory / (FILE if before.is_file() else PROJECT))
        script = self.directory / "judge"
        script.write_text(judge)
        script.chmod(0o755)
        (self.directory / PROMPT).write_text(prompt)

    def freeze(self) -> Path | None:
        """Copy the agent's kernel out of its reach; return the copy.

        None if there is none, or if it cannot be copied, such as a pipe, or too many files.
        """
        try:
            return take_candidate(self.directory, self.run / "given" / PROJECT, self.frozen.parent)
        except (OSError, shutil.Error, RecursionError):
            remove_tree(self.frozen.parent)
            return None

    @property
    def frozen(self) -> Path:
        """Where `freeze` puts a file; a project is beside it."""
        return self.root / "candidate" / FILE

    def frozen_candidate(self) -> Path | None:
        """Return the copy that `freeze` made, or None."""
        return next((path for path in (self.frozen, self.frozen.parent / PROJECT) if path.exists()), None)


def task_path(run: Path) -> Path:
    """Return the copy of the task in the directory of a search."""
    entries = sorted((run / "given" / "task").iterdir(), key=lambda path: path.suffix == ".toml")
    return entries[0]  # a directory, or a problem file that may have settings beside it


def take_candidate(workspace: Path, pristine: Path, target: Path) -> Path | None:
    """Copy the candidate of a workspace, a file or a project that differs from the initial one, into a directory."""
    target.mkdir(parents=True, exist_ok=True)
    if (workspace / FILE).is_file():
        copy_candidate(workspace / FILE, target / FILE)
        return target / FILE
    if (workspace / PROJECT).is_dir():
        copy_candidate(workspace / PROJECT, target / PROJECT)
        if candidate_digest(target / PROJECT) != candidate_digest(pristine):
            return target / PROJECT
    remove_tree(target)
    return None


def template(name: str) -> string.Template:
    """Return a template of a file that a search writes."""
    return string.Template((_TEMPLATES / name).read_text(encoding="utf-8"))


def prompt_text(request: SearchRequest, attempt: PlannedAttempt, task: Task, feedback: str) -> str:
    """Return the instructions of an agent, on its standard input and in `PROMPT.md`."""
    return template(PROMPT).substitute(
        task=task.name,
        requirements="\n".join(f"- {line}" for line in task.description()),
        minutes=f"{request.limits.seconds / 60:.3g}",
        context="".join(f"- `context/{name}/`: {_CONTEXTS[name]}\n" for name in attempt.context),
        feedback=feedback,
    )


def judge_script(request: SearchRequest) -> str:
    """Return the script `judge` of a workspace: it prints a verdict on the current files."""
    command = python_module("kernel_judge.search.workspace_judge", str(request.run), ".")
    return f'#!/bin/sh\ncd "$(dirname "$0")" || exit 2\nexec {shlex.join(command)}\n'


def verdict_text(verdict: Verdict) -> str:
    """Return a verdict for an agent."""
    times = [f"times: {json.dumps(case)}" for case in verdict.cases]
    return "\n".join([f"The candidate is {verdict.verdict}.", *verdict.lines(), *times])
