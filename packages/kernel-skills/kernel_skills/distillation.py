"""A skill from the best traces of a search, kept only if it helps a student agent.

WORK/traces/       the input of the writing agent: candidates with their logs and verdicts, and common mistakes
WORK/skill/NAME/   its output files
WORK/agent.log     its log
WORK/benefit/      the evaluation of the student
"""

from __future__ import annotations

import json
import shlex
import shutil
import string
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kernel_format.errors import ConfigError
from kernel_judge.api import RIGHT, WRONG, Limits, Notify, SearchRequest, Try, read_tries, run_limited, task_path
from kernel_skills.benefit import HELPS, Benefit, measure_benefit
from kernel_skills.catalog import MOST_TOKENS, SKILL_FILE, Skill, read_skill
from kernel_skills.installation import copy_skill

_PROMPT = Path(__file__).parent / "distil.md"
_MOST_TRACES = 3
_MOST_MISTAKES = 10
_LOG_BYTES = 200_000  # the end of an agent's output; the whole of it would not fit into a context


@dataclass(frozen=True)
class Distilled:
    """A skill that an agent wrote, and its effect. `kept` is its directory; None if it does not help."""

    skill: Skill
    benefit: Benefit
    kept: Path | None


def distil(
    source: Path, target: Path, writer: str, tasks: Sequence[Path], tries: int, student: SearchRequest, notify: Notify
) -> Distilled:
    """Let an agent write a skill, evaluate it, and put it to its place if it helps. Goes on where it was stopped.

    Args:
        source: The directory of the search.
        target: The directory of the new skill; its name is the skill's.
        writer: The command of the agent that writes it.
        tasks: Those of the evaluation; none for the task of the search.
        tries: Of each task, with the skill and as many without it.
        student: The agent that tries the tasks, its limits, and the directory of work.
    """
    if target.exists():
        raise ConfigError("exists", where=str(target), hint="move it away, or name another -o DIR")
    work = student.run.absolute()
    directory = work / "skill" / target.resolve().name
    if not (directory / SKILL_FILE).is_file():
        _gather(source, work / "traces")
        notify(f"{writer} writes {directory / SKILL_FILE}")
        _write(writer, student.limits, work, directory)
    try:
        skill = read_skill(directory)
    except ConfigError as error:
        error.hint = f"the agent's output is in {work / 'agent.log'}; correct the file or remove it, and run again"
        raise
    template = replace(student, run=work / "benefit")
    benefit = measure_benefit(skill, tasks or [task_path(source)], tries, template, notify)
    if benefit.conclusion != HELPS:
        return Distilled(skill, benefit, None)
    try:
        copy_skill(skill, target)
    except ConfigError as error:
        error.hint = f"the skill is in {skill.directory}; copy it where you want it"
        raise
    return Distilled(skill, benefit, target)


def _gather(source: Path, traces: Path) -> None:
    """Copy the fastest right candidates of a search, with how they came about, and the reasons of wrong ones."""
    tries = read_tries(source)
    best = _best(tries)
    if not best:
        raise ConfigError(
            "no try of this search is right, so there is nothing to learn from",
            where=str(source),
            hint="search with more attempts, or with another agent",
        )
    shutil.rmtree(traces, ignore_errors=True)
    shutil.copytree(source / "given" / "task", traces / "task")
    for rank, made in enumerate(best, 1):
        place = traces / str(rank)
        place.mkdir()
        candidate = made.workspace.frozen_candidate()
        assert candidate and made.verdict, "a try that is right has a candidate"
        if candidate.is_dir():
            shutil.copytree(candidate, place / candidate.name, symlinks=True)
        else:
            shutil.copyfile(candidate, place / candidate.name)
        (place / "agent.log").write_bytes(made.workspace.log.read_bytes()[-_LOG_BYTES:])
        (place / "verdict.json").write_text(json.dumps(made.verdict.as_dict(), indent=1), encoding="utf-8")
    mistakes = dict.fromkeys(made.reason for made in tries if made.outcome == WRONG)
    text = "".join(f"- {reason}\n" for reason in list(mistakes)[:_MOST_MISTAKES])
    (traces / "mistakes.md").write_text(text, encoding="utf-8")


def _best(tries: Sequence[Try]) -> list[Try]:
    distinct: dict[str | None, Try] = {}
    for made in sorted(tries, key=lambda made: made.ratio, reverse=True):
        if made.outcome == RIGHT:
            distinct.setdefault(made.candidate, made)
    return list(distinct.values())[:_MOST_TRACES]


def _write(writer: str, limits: Limits, work: Path, directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.parent.mkdir(parents=True, exist_ok=True)
    text = string.Template(_PROMPT.read_text(encoding="utf-8")).substitute(
        name=directory.name, file=directory.relative_to(work) / SKILL_FILE, tokens=MOST_TOKENS
    )
    prompt = work / "PROMPT.md"
    prompt.write_text(text, encoding="utf-8")
    log = work / "agent.log"
    with log.open("wb") as output:
        ended = run_limited(shlex.split(writer), work, limits, stdin=prompt, output=output)
    if not (directory / SKILL_FILE).is_file():
        why = f"it met its limit of {ended.stopped}" if ended.stopped else f"its exit status is {ended.exit_status}"
        raise ConfigError(
            f"the agent wrote no {directory.relative_to(work) / SKILL_FILE}; {why}",
            where=writer,
            hint=f"its output is in {log}",
        )
