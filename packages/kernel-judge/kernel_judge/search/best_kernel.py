"""The best kernel of a search: the fastest right candidate that is faster than the reference, written as a project.

A speed that was chosen because it was the largest of many is too large on average, so that candidate is judged once
more, with other inputs. The reference stays the best until a candidate has passed twice.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kernel_builder.api import Project, python_name, read_project
from kernel_format import front_matter
from kernel_format.files import remove_tree, replaced_directory
from kernel_judge.judge.verdict import Notify, Verdict, cause
from kernel_judge.search.local_judge import Judge, Judged
from kernel_judge.search.run_log import REFERENCE_PEER, VERIFIED, RunLog
from kernel_judge.search.tries import Try, agent_names, tries_of
from kernel_judge.search.workspace import template


def contenders(tries: Iterable[Try]) -> list[Try]:
    """Return the tries with right candidates that are faster than the reference, the fastest first; equal ones once."""
    by_digest: dict[str | None, Try] = {}
    for each in tries:
        if each.ratio > 1.0:
            by_digest.setdefault(each.candidate, each)
    return sorted(by_digest.values(), key=lambda each: (-each.ratio, each.attempt, each.number))


def choose(log: RunLog, judge: Judge, run: Path, notify: Notify) -> tuple[Try, Verdict] | None:
    """Verify contenders until none of the others can be faster; return the best and its second verdict.

    A contender is judged again only if its first verdict has a higher speed than the second one of the best so far.
    None means that the reference is the best.
    """
    best: tuple[Try, Verdict] | None = None
    for contender in contenders(tries_of(log.events, run)):
        fastest = best[1].ratio if best else 1.0
        if contender.ratio <= fastest:
            break
        second = _verified(log, judge, contender)
        verdict = second.verdict
        if verdict and verdict.is_right and verdict.ratio > fastest:
            best = contender, verdict
        else:
            reason = verdict.reason if verdict else second.error
            then = cause(reason) if reason else f"{verdict.ratio if verdict else 0:.2f} times"
            notify(
                f"attempt {contender.attempt}, try {contender.number} is not the best: {contender.ratio:.2f} times the "
                f"speed of {REFERENCE_PEER} at first, then {then}"
            )
    return best


def _verified(log: RunLog, judge: Judge, contender: Try) -> Judged:
    event = log.find(VERIFIED, candidate=contender.candidate)
    if event and event["judged"]["verdict"]:  # without a verdict, the judge itself had failed
        return Judged.from_dict(event["judged"])
    frozen = contender.workspace.frozen_candidate()
    assert frozen
    judged = judge(frozen)
    about = {"attempt": contender.attempt, "try": contender.number, "candidate": contender.candidate}
    log.append(VERIFIED, **about, judged=judged.as_dict())
    return judged


def write_best(best: Try, verdict: Verdict, *, repo_id: str, backends: Sequence[str]) -> None:
    """Write the best candidate as a project that can be published, `best/`, with its second verdict in the card."""
    candidate = best.workspace.frozen_candidate()
    assert candidate
    with replaced_directory(best.run / "best") as staged:
        if candidate.is_file():
            _write_project(staged, candidate, repo_id, backends)
        else:
            shutil.copytree(candidate, staged, symlinks=True, dirs_exist_ok=True)
        _write_card(staged, read_project(staged), best, verdict)


def _write_project(directory: Path, source: Path, repo_id: str, backends: Sequence[str]) -> None:
    """Make a project without a build step from one Python file."""
    name = repo_id.rpartition("/")[2]
    text = template("build.toml").substitute(name=name, repo_id=repo_id, backends=json.dumps(list(backends)))
    (directory / "build.toml").write_text(text, encoding="utf-8")
    package = directory / "torch-ext" / python_name(name)
    package.mkdir(parents=True)
    shutil.copyfile(source, package / "model.py")
    init = f'"""{name}: a model written by an agent."""\n\nfrom .model import ModelNew\n\n__all__ = ["ModelNew"]\n'
    (package / "__init__.py").write_text(init, encoding="utf-8")
    (directory / "candidate.py").write_text(template("candidate.txt").template, encoding="utf-8")


def _write_card(directory: Path, project: Project, best: Try, verdict: Verdict) -> None:
    """Write `CARD.md`: the author's front matter, and the agent and second verdict in place of the template's text."""
    card = directory / "CARD.md"
    values: dict[str, Any] = {"license": project.license}
    with suppress(OSError, ValueError):  # without a card, or with one that is not YAML: an agent wrote it
        values |= front_matter.parse(front_matter.split(card.read_text(encoding="utf-8"))[0] or "{}")
    (program,) = agent_names([best.agent]).values()
    facts = "\n".join(f"- {line}" for line in verdict.lines())
    text = template("CARD.md").substitute(vars(verdict), name=project.name, program=program, facts=facts)
    remove_tree(card)  # which may be a directory
    card.write_text(f"{front_matter.join(values, text)}\n", encoding="utf-8")
