"""How much a skill helps an agent: the same tasks, agent, limits and judge, with the skill and without.

Each task is one search in which every second attempt has the skill, so that both groups meet the same state of the
machine. Like any search, it goes on where it was stopped.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from kernel_format.errors import ConfigError
from kernel_format.files import write_atomically
from kernel_judge.api import RIGHT, SKILL, Notify, SearchRequest, read_tries, run_search
from kernel_skills.catalog import Skill
from kernel_skills.intervals import CONFIDENCE, Compared, compare_means, compare_shares
from kernel_tasks import is_task

HELPS, HARMS, MIXED, NO_HELP = "helps", "harms", "mixed", "no measurable help"
_SETTINGS = "skill.json"


class SkillTry(NamedTuple):
    """One try of a task. The speed is that relative to eager, at least 1.0; 1.0 if the candidate is wrong."""

    task: str
    has_skill: bool
    is_right: bool
    speed: float
    seconds: float


@dataclass(frozen=True)
class Benefit:
    """The effect of a skill on the tries of an agent, half of them with the skill.

    `measures` has the intervals of "pass@1", "speedup@1" and "seconds". The conclusion is "helps", "harms", "mixed"
    (more right and slower, or the other way) or "no measurable help".
    """

    tries: Sequence[SkillTry]
    measures: Mapping[str, Compared]
    conclusion: str


def find_tasks(directory: Path) -> list[Path]:
    """Return the tasks in a directory. Of Python files, those are tasks that define `get_inputs`."""
    if directory.is_file():
        return [directory]
    entries = sorted(directory.iterdir()) if directory.is_dir() else []
    tasks = [each for each in entries if is_task(each) and (each.suffix != ".py" or b"get_inputs" in each.read_bytes())]
    if not tasks:
        raise ConfigError(
            "has no task; expected files or directories that `judge` takes, such as Python files with get_inputs",
            where=str(directory),
            hint="a checkout of KernelBench has tasks in KernelBench/level1",
        )
    return tasks


def measure_benefit(
    skill: Skill, tasks: Sequence[Path], tries: int, template: SearchRequest, notify: Notify
) -> Benefit:
    """Let the agent try each task with the skill, and as often without it, and compare.

    The template has the agent, the limits and the directory; the task and the attempts are set here.
    """
    _claim(template.run, skill, tries)
    results: list[SkillTry] = []
    stems = [task.stem for task in tasks]
    for task in tasks:
        name = task.stem if stems.count(task.stem) == 1 else task.name
        run = template.run / name
        request = replace(
            template, task=task, run=run, attempts=2 * tries, tries=1, contexts=((), (SKILL,)), skill=skill.directory
        )
        run_search(request, notify)
        results += [
            SkillTry(name, SKILL in made.context, made.outcome == RIGHT, max(1.0, made.ratio), made.agent_seconds)
            for made in read_tries(run)
        ]
    return compare_tries(results)


def _claim(run: Path, skill: Skill, tries: int) -> None:
    """Record the evaluated skill, or check that it is the recorded one: groups of tries must not be mixed."""
    files = {name: hashlib.sha256(content).hexdigest() for name, content in skill.files().items()}
    settings = json.dumps({"skill": skill.name, "files": files, "tries": tries}, indent=1)
    run.mkdir(parents=True, exist_ok=True)
    file = run / _SETTINGS
    if file.exists() and file.read_text(encoding="utf-8") != settings:
        raise ConfigError(
            "is the directory of an evaluation of another skill, of another text of it, or with another -k",
            where=str(run),
            hint="name another directory with --run",
        )
    write_atomically(file, settings)


def compare_tries(tries: Sequence[SkillTry]) -> Benefit:
    """Compare the tries with the skill with those without it; there are equally many for every task."""
    tasks = list(dict.fromkeys(each.task for each in tries))
    groups = [
        [[each for each in tries if each.task == task and each.has_skill == has_skill] for task in tasks]
        for has_skill in (False, True)
    ]

    def values(name: str) -> list[list[list[float]]]:
        return [[[max(getattr(each, name), 1e-3) for each in task] for task in group] for group in groups]

    measures = {
        "pass@1": compare_shares(*([each.is_right for task in group for each in task] for group in groups)),
        "speedup@1": compare_means(*values("speed")),
        "seconds": compare_means(*values("seconds")),
    }
    return Benefit(tries, measures, _conclusion(measures))


def _conclusion(measures: Mapping[str, Compared]) -> str:
    right, speed = measures["pass@1"], measures["speedup@1"]
    better, worse = right.low > 0 or speed.low > 1, right.high < 0 or speed.high < 1
    if better and worse:
        return MIXED
    return HELPS if better else HARMS if worse else NO_HELP


def benefit_lines(benefit: Benefit) -> list[str]:
    """Return a comparison as text with a table."""
    summary = {
        HELPS: "The skill helps.",
        HARMS: "The skill harms.",
        MIXED: "The skill makes one of pass@1 and speedup@1 better and the other worse.",
        NO_HELP: "No measurable help: neither pass@1 nor speedup@1 differs by more than chance gives.",
    }
    tasks = len({each.task for each in benefit.tries})
    lines = [
        summary[benefit.conclusion],
        f"{tasks} tasks, {len(benefit.tries) // (2 * tasks)} tries of each with the skill and as many without it.",
        f"{'':<12}{'without':>10}{'with':>10}{'change':>10}   {CONFIDENCE:.1%} interval",
    ]
    for name, (without, with_skill, *changes) in benefit.measures.items():
        is_share = name.startswith("pass")
        change, low, high = (f"{value:+.2f}" if is_share else f"{value:.2f}x" for value in changes)
        lines.append(f"{name:<12}{without:>10.2f}{with_skill:>10.2f}{change:>10}   {low} to {high}")
    return lines
