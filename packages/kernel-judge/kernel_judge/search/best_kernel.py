"""Choose the best kernel of a search, and write it as a project.

The best is the fastest right candidate that is faster than the reference. A speed that was chosen because it was the
largest of many is too large on average, so that candidate is judged once more, with other inputs, before it is called
the best. The reference stays the best until a candidate has passed twice.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from kernel_builder.config.project import Project, python_name
from kernel_builder.config.project_files import read_project
from kernel_builder.package import swap
from kernel_format import front_matter
from kernel_judge.judge.verdict import RIGHT, Verdict, cause
from kernel_judge.search import mailbox
from kernel_judge.search.local_judge import Judge, Judged
from kernel_judge.search.run_log import REFERENCE_PEER, TRY_ENDED, VERIFIED, Event, RunLog
from kernel_judge.search.workspace import Workspace

FLOOR = 1.0  # the speed of the reference, which is used where no candidate is faster
_BUILD_TOML = """[general]
name = "{name}"
version = 1
edition = 5
license = "apache-2.0"
backends = {backends}

[general.hub]
repo-id = "{repo_id}"

[torch-noarch]
"""
_CANDIDATE = """\"\"\"Loads the model from `build/`, for `kernel-builder judge`.\"\"\"

from pathlib import Path

from kernels import get_local_kernel

ModelNew = get_local_kernel(Path(__file__).parent).ModelNew
"""


class Contender(NamedTuple):
    """A candidate that may become the best: where it was made, and its speed beside the reference."""

    attempt: int
    number: int
    candidate: str
    agent: str
    ratio: float

    @property
    def program(self) -> str:
        """The agent's program. Its arguments are not for publication: they may have a key."""
        if mailbox.is_mailbox(self.agent):
            return "mailbox"
        return Path(shlex.split(self.agent)[0]).name


def contenders(events: Iterable[Event]) -> list[Contender]:
    """Return the right candidates that are faster than the reference, the fastest first; equal ones once."""
    by_digest: dict[str, Contender] = {}
    for event in events:
        if event["event"] != TRY_ENDED or event["outcome"] != RIGHT:
            continue
        verdict = Judged.from_dict(event["judged"]).verdict
        speed = verdict.speed.get(REFERENCE_PEER) if verdict else None
        if speed and speed.ratio > FLOOR:
            key = event["candidate"]
            by_digest.setdefault(key, Contender(event["attempt"], event["try"], key, event["agent"], speed.ratio))
    return sorted(by_digest.values(), key=lambda contender: (-contender.ratio, contender.attempt, contender.number))


def choose(log: RunLog, judge: Judge, run: Path) -> tuple[Contender, Verdict] | None:
    """Verify contenders until none of the others can be faster; return the best and its second verdict.

    A contender is judged again only if its first verdict has a higher speed than the second one of the best so far.
    None means that the reference is the best.
    """
    best: tuple[Contender, Verdict] | None = None
    for contender in contenders(log.events):
        if best and contender.ratio <= _ratio(best[1]):
            break
        verdict = _verified(log, judge, run, contender)
        if verdict and verdict.is_right and _ratio(verdict) > (_ratio(best[1]) if best else FLOOR):
            best = contender, verdict
    return best


def explained(events: Sequence[Event], kept: str | None) -> list[str]:
    """Return in sentences why candidates that seemed to be the fastest were not kept.

    Args:
        events: The log of a search.
        kept: The digest of the best candidate; None if it is the reference.
    """
    sentences = []
    verified = {event["candidate"]: Judged.from_dict(event["judged"]) for event in events if event["event"] == VERIFIED}
    for contender in contenders(events):
        if contender.candidate == kept or contender.candidate not in verified:
            continue
        second = verified[contender.candidate]
        if second.verdict is None:
            why = f"had no second verdict: {cause(second.error or '')}"
        elif not second.verdict.is_right:
            why = f"is wrong in its second verdict: {cause(second.verdict.reason)}"
        else:
            speed = second.verdict.speed[REFERENCE_PEER]
            why = f"has {speed.ratio:.2f} ({speed.low:.2f} to {speed.high:.2f}) in its second verdict"
        sentences.append(
            f"Not kept: attempt {contender.attempt}, try {contender.number}, measured as {contender.ratio:.2f} times "
            f"the speed of {REFERENCE_PEER}, {why}."
        )
    return sentences


def _ratio(verdict: Verdict) -> float:
    speed = verdict.speed.get(REFERENCE_PEER)
    return speed.ratio if speed else 0.0


def _verified(log: RunLog, judge: Judge, run: Path, contender: Contender) -> Verdict | None:
    event = log.find(VERIFIED, candidate=contender.candidate)
    if event is None or event["judged"]["verdict"] is None:  # without a verdict, the judge itself had failed
        frozen = Workspace(run, contender.attempt, contender.number).frozen_candidate()
        assert frozen
        judged = judge.judge(frozen)
        log.append(
            VERIFIED,
            attempt=contender.attempt,
            **{"try": contender.number},
            candidate=contender.candidate,
            judged=judged.as_dict(),
        )
        return judged.verdict
    return Judged.from_dict(event["judged"]).verdict


def write(run: Path, contender: Contender, verdict: Verdict, *, repo_id: str, backends: Sequence[str]) -> Path:
    """Write the best candidate as a project that can be published, with its verdict in the card.

    Returns:
        `best/` in the directory of the search. It changes as a whole, or not at all.

    Raises:
        ConfigError: If the candidate is a project that the builder does not accept.
    """
    frozen = Workspace(run, contender.attempt, contender.number).frozen_candidate()
    assert frozen
    target = run / "best"
    with swap.staging(target, movable=lambda _: True) as staged:
        if frozen.is_file():
            _write_project(staged, frozen, repo_id, backends)
        else:
            shutil.copytree(frozen, staged, symlinks=True, dirs_exist_ok=True)
        _write_card(staged, read_project(staged), contender, verdict)
        swap.publish(staged, target, replace_all=[path.name for path in target.iterdir()] if target.is_dir() else [])
    return target


def _write_project(directory: Path, source: Path, repo_id: str, backends: Sequence[str]) -> None:
    """Make a project without a build step from one Python file."""
    name = repo_id.rpartition("/")[2]
    text = _BUILD_TOML.format(name=name, repo_id=repo_id, backends=json.dumps(list(backends)))
    (directory / "build.toml").write_text(text, encoding="utf-8")
    package = directory / "torch-ext" / python_name(name)
    package.mkdir(parents=True)
    shutil.copyfile(source, package / "model.py")
    init = f'"""{name}: a model written by an agent."""\n\nfrom .model import ModelNew\n\n__all__ = ["ModelNew"]\n'
    (package / "__init__.py").write_text(init, encoding="utf-8")
    (directory / "candidate.py").write_text(_CANDIDATE, encoding="utf-8")


def _write_card(directory: Path, project: Project, contender: Contender, verdict: Verdict) -> None:
    """Write `CARD.md`: the author's front matter, and the verdict in place of the text of the template."""
    card = directory / "CARD.md"
    values: dict[str, Any] = {"license": project.license}
    with suppress(OSError, ValueError):  # without a card, or with one that is not YAML: an agent wrote it
        front, _ = front_matter.split(card.read_text(encoding="utf-8"))
        values |= front_matter.parse(front or "{}")
    card.write_text(front_matter.join(values, card_text(project.name, contender, verdict)) + "\n", encoding="utf-8")


def card_text(name: str, contender: Contender, verdict: Verdict) -> str:
    """Return the text of the card: what the kernel does, who wrote it, and the second verdict on it."""
    rows = ["| beside | speed | 95 % interval |", "| --- | --- | --- |"]
    for peer, speed in verdict.speed.items():
        rows.append(f"| {peer} | {speed.ratio:.2f} | {speed.low:.2f} to {speed.high:.2f} |")
    lines = [
        f"# {name}",
        "",
        f"A replacement for the model of the task `{verdict.task}`: `ModelNew` takes the place of `Model`.",
        "",
        "## Verdict",
        "",
        f"Written by an agent (`{contender.program}`) and judged by `kernel-builder judge` on {verdict.device}: right, "
        "twice, with inputs from different seeds. The speeds are from the second time; 1 is the speed of the peer, and "
        "each is a geometric mean over the shapes of the task.",
        "",
        *rows,
        "",
    ]
    if verdict.share_of_copy_speed is not None:
        lines.append(f"- share of copy speed: {verdict.share_of_copy_speed:.2f}")
    if verdict.share_of_peak is not None:
        lines.append(f"- share of peak arithmetic: {verdict.share_of_peak:.2f}")
    lines += [f"- suspicious: {fact}" for fact in verdict.suspicious]
    lines += [
        f"- task: `{verdict.task}`, SHA-256 `{verdict.task_digest}`",
        f"- candidate: SHA-256 `{verdict.candidate_digest}`",
        f"- sandbox of the judge: {verdict.sandbox}",
    ]
    return "\n".join(lines)
