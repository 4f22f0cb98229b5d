"""Write the tables of docs/judge.md and docs/skills.md from the results.

    python benchmarks/judge_tables.py
    python benchmarks/judge_tables.py --agents RUNS.json --agent NAME     keeps runs of a coding agent, first

A table is between `<!-- figures: NAME -->` and `<!-- /figures -->`. RUNS.json has an object for each run: "task",
"skill" (whether the agent had it), "minutes", "kind" of the candidate, and "verdict", that of `judge --json`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import result_files

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
AGENTS, KERNELBENCH = RESULTS / "agents.json", RESULTS / "kernelbench.json"
SKILLS, JUDGE = ROOT / "docs" / "skills.md", ROOT / "docs" / "judge.md"
RIGHT = "right"
ARMS = {False: "without", True: "with"}


def fill(page: str, name: str, text: str) -> str:
    """Return a page with a block of figures replaced.

    Raises:
        ValueError: If it does not have the block once.
    """
    start, end = f"<!-- figures: {name} -->", "<!-- /figures -->"
    page, number = re.subn(f"{start}.*?{end}", lambda _: f"{start}\n\n{text}\n\n{end}", page, flags=re.DOTALL)
    if number != 1:
        raise ValueError(f"the page must have {start} and {end} once, has them {number} times")
    return page


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def agents(saved: Mapping[str, Any] | None) -> str:
    """Return the runs of a coding agent with the skill and without it."""
    if saved is None:
        return "There are no runs on a GPU yet."
    runs: list[Mapping[str, Any]] = saved["runs"]
    rows = [
        [f"`{run['task']}`", ARMS[run["skill"]], _number(run["minutes"], 0), *_verdict(run["verdict"] or {})]
        for run in sorted(runs, key=lambda run: (run["task"], run["skill"]))
    ]
    head = ["task", "skill", "minutes", "verdict", "us", "share of copy speed", "eager / it", "torch.compile / it"]
    devices = {run["verdict"]["device"] for run in runs if "device" in (run["verdict"] or {})}
    return (
        f"One coding agent ({saved['agent']}), one try of each, one day ({saved['date']}), no GPU while it worked; "
        f"judged once afterwards ({', '.join(sorted(devices))}). The skill was that of {saved['skill-version']}.\n\n"
        f"{table(head, rows)}\n\n{table(_SUMMARY_HEAD, _summary(runs))}\n\n{_conclusion(runs)}"
    )


_SUMMARY_HEAD = ["skill", "right", "geometric mean: eager / it", "torch.compile / it", "median minutes"]


def _verdict(verdict: Mapping[str, Any]) -> list[str]:
    word = verdict.get("rejected-as") or verdict.get("verdict") or "none"
    cases = verdict.get("cases") or [{"milliseconds": {}}]
    ours = cases[0]["milliseconds"].get("candidate")
    ratios = [_ratio(verdict, peer) for peer in ("eager", "compile")]
    figures = [ours * 1e3 if ours else None, verdict.get("share-of-copy-speed")]
    return [word, _number(figures[0], 1), _number(figures[1], 2), *(_number(ratio, 2) for ratio in ratios)]


def _ratio(verdict: Mapping[str, Any], peer: str) -> float | None:
    speed = verdict.get("speed", {}).get(peer)
    return float(speed["ratio"]) if speed else None


def _summary(runs: Sequence[Mapping[str, Any]]) -> Iterable[list[str]]:
    for has_skill, name in ARMS.items():
        arm = [run for run in runs if run["skill"] == has_skill]
        verdicts = [run["verdict"] or {} for run in arm]
        minutes = [run["minutes"] for run in arm if run["minutes"] is not None]
        # As in `skills eval`: what is wrong or slower counts as 1, since the reference is used in its place.
        means = [
            statistics.geometric_mean([max(1.0, _ratio(verdict, peer) or 1.0) for verdict in verdicts])
            for peer in ("eager", "compile")
        ]
        right = sum(verdict.get("verdict") == RIGHT for verdict in verdicts)
        median = statistics.median(minutes) if minutes else None
        yield [name, f"{right} of {len(arm)}", *(f"{mean:.2f}" for mean in means), _number(median, 1)]


def _conclusion(runs: Sequence[Mapping[str, Any]]) -> str:
    """Say on how many tasks the skill was better: the sign test of so few tasks shows large differences only."""
    of_task: dict[str, dict[bool, float]] = {}
    for run in runs:
        verdict = run["verdict"] or {}
        of_task.setdefault(run["task"], {})[run["skill"]] = max(1.0, _ratio(verdict, "eager") or 1.0)
    pairs = [arms for arms in of_task.values() if len(arms) == len(ARMS)]
    faster, slower = (sum(sign * (arms[True] - arms[False]) > 0 for arms in pairs) for sign in (1, -1))
    return (
        f"With the skill, the result is faster on {faster} of {len(pairs)} tasks and slower on {slower}. Two runs of "
        "one task differ by chance, too: this says something of this agent, these tasks and this day."
    )


def kernelbench(saved: Mapping[str, Any]) -> str:
    """Return what the tasks of KernelBench leave open, and the verdicts on their own models."""
    levels: dict[str, Mapping[str, Any]] = saved["levels"]
    problems: list[Mapping[str, Any]] = saved["problems"]

    def shares(key: str, of: str) -> list[str]:
        return [f"{level[key]} of {level[of]}" for level in levels.values()]

    counts = [
        ("looked at", shares("looked-at", "problems")),
        ("inputs are never negative", shares("never-negative", "with-inputs")),
        ("has parameters that are all ones or all zeros", shares("ones-or-zeros", "with-parameters")),
        ("no size at the top level changes a shape", shares("literal-shapes", "looked-at")),
        ("own model judged, and right", [_judged(level) for level in levels.values()]),
    ]
    lines = [table(["", *(f"level {number}" for number in levels)], [[name, *values] for name, values in counts])]
    left_out = [f"{row['problem']} ({row['left-out']})" for row in problems if "left-out" in row]
    if left_out:
        lines.append(f"Not looked at: {', '.join(left_out)}.")
    others = [row for row in problems if row.get("verdict", RIGHT) != RIGHT]
    if others:
        named = ", ".join(f"{row['level']}/{row['problem'].partition('_')[0]} ({row['verdict']})" for row in others)
        lines.append(f"Not right, or without a verdict: {named}.")
    return "\n\n".join(lines)


def _judged(level: Mapping[str, Any]) -> str:
    verdicts: Mapping[str, int] = level["verdicts"]
    return f"{verdicts.get(RIGHT, 0)} of {sum(verdicts.values())}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.is_file() else None


def filled() -> dict[Path, str]:
    """Return the pages with the tables that the results give."""
    return {
        SKILLS: fill(SKILLS.read_text(), "agents", agents(read(AGENTS))),
        JUDGE: fill(JUDGE.read_text(), "kernelbench", kernelbench(read(KERNELBENCH))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=Path, metavar="RUNS.json")
    parser.add_argument("--agent", default="unnamed", metavar="NAME")
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    parser.add_argument("--skill-version", default="this commit")
    arguments = parser.parse_args()
    if arguments.agents:
        runs = read(arguments.agents)
        keys = ("task", "skill", "minutes", "kind", "verdict")
        kept = [{key: run.get(key) for key in keys} for run in (runs.values() if isinstance(runs, dict) else runs)]
        named = {"agent": arguments.agent, "date": arguments.date, "skill-version": arguments.skill_version}
        result_files.write(AGENTS, named | {"runs": kept})
    for path, text in filled().items():
        path.write_text(text)


if __name__ == "__main__":
    main()
