"""The report: estimators against enumeration, groups, tables and JSON."""

from __future__ import annotations

import json
import math
import statistics
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

import pytest

from kernel_format.errors import ConfigError
from kernel_judge.judge.verdict import Speedup, Verdict
from kernel_judge.search.best_kernel import contenders
from kernel_judge.search.run_log import LOG
from kernel_judge.search.run_report import make_report, pass_at_k, speedup_at_k
from kernel_judge.search.tries import tries_of
from kernel_judge.search.workspace import Workspace
from tests.support.cli import expect, invoke
from tests.support.files import replace, write_files

SPEEDS = [1.0, 1.0, 1.3, 2.5, 1.3, 4.0, 1.1]


@pytest.mark.parametrize("k", range(1, 8))
def test_speedup_at_k_is_the_mean_over_all_sets(k: int) -> None:
    expected = statistics.fmean(max(chosen) for chosen in combinations(SPEEDS, k))
    assert speedup_at_k(SPEEDS, k) == pytest.approx(expected)


@pytest.mark.parametrize("k", range(1, 8))
@pytest.mark.parametrize("right", range(8))
def test_pass_at_k_is_the_mean_over_all_sets(k: int, right: int) -> None:
    outcomes = [True] * right + [False] * (7 - right)
    expected = statistics.fmean(any(chosen) for chosen in combinations(outcomes, k))
    assert pass_at_k(7, right, k) == pytest.approx(expected)


def verdict(speed: float | None) -> Verdict:
    right = speed is not None
    peers = (
        {"eager": Speedup(speed, speed, speed), "compile": Speedup(speed / 2, speed / 2, speed / 2)} if right else {}
    )
    result = ("right", "", None) if right else ("wrong", "it is", "wrong-result")
    return Verdict(*result, None, "task", "0", "0", "process", "none", 1.0, peers)


def ended(attempt: int, number: int, speed: float | None, *, agent: str, context: list[str]) -> dict[str, Any]:
    judged = {"verdict": verdict(speed).as_dict(), "error": None, "seconds": 5.0}
    return {
        "event": "try-ended",
        "attempt": attempt,
        "try": number,
        "agent": agent,
        "context": context,
        "outcome": "wrong" if speed is None else "right",
        "candidate": f"{attempt}/{number}",
        "agent-seconds": 5.0,
        "judged": judged,
    }


def write_run(directory: Path, task: str, speeds: list[tuple[float | None, float | None]]) -> Path:
    """Write the log of a search with two agents, two contexts and two tries for each attempt; one is not finished."""
    started = {"event": "started", "task": task, "tries": 2, "attempts": len(speeds) + 1}
    events: list[dict[str, Any]] = [started]
    for number, pair in enumerate(speeds, 1):
        about = {"agent": f"agent-{number % 2}", "context": ["skill"] if number % 4 > 1 else []}
        events += [ended(number, place, speed, **about) for place, speed in enumerate(pair, 1)]
    events.append(ended(len(speeds) + 1, 1, 9.0, agent="agent-0", context=[]))
    directory.mkdir()
    (directory / LOG).write_text("".join(json.dumps(event) + "\n" for event in events))
    return directory


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    first = [(None, 2.0), (0.5, 0.8), (None, None), (3.0, 4.0)]
    second = [(None, None), (1.5, 1.2), (None, None), (None, 1.0)]
    return [write_run(tmp_path / "one", "one", first), write_run(tmp_path / "two", "two", second)]


def test_groups_have_the_figures_of_their_attempts(runs: list[Path]) -> None:
    report = make_report(runs, "eager")
    everything = report.groups[0]
    assert (everything.tasks, everything.attempts, everything.right) == (2, 8, 5)
    assert everything.pass_at[1] == pytest.approx((3 / 4 + 2 / 4) / 2)
    assert everything.pass_at[4] == 1
    assert everything.speedup_at[4] == pytest.approx(math.sqrt(4.0 * 1.5))
    named = {(group.by, group.name): group for group in report.groups}
    assert set(named) == {
        ("all", "all"),
        *(("agent", f"agent-{number}") for number in (0, 1)),
        *(("context", name) for name in ("none", "skill")),
    }
    assert named["agent", "agent-0"].speedup_at[2] == pytest.approx(math.sqrt(4.0 * 1.5))
    assert 4 not in named["agent", "agent-0"].pass_at
    assert report.unfinished == 2


def test_speeds_may_be_relative_to_another_peer(runs: list[Path]) -> None:
    assert make_report(runs, "compile").groups[0].speedup_at[4] == pytest.approx(math.sqrt(2.0 * 1.0))
    with pytest.raises(ConfigError, match="no speed relative to max-autotune"):
        make_report(runs, "max-autotune")


def test_the_best_does_not_depend_on_the_order() -> None:
    speeds = (2.5, 0.5, None, 1.0, 2.4, 1.5)
    events = [ended(number, 1, speed, agent="a", context=[]) for number, speed in enumerate(speeds, 1)]
    for order in permutations(events):
        assert [contender.ratio for contender in contenders(tries_of(order, Path()))] == [2.5, 2.4, 1.5]


def test_the_command_prints_a_table_and_each_try_or_json(runs: list[Path]) -> None:
    wrong = "it raised RuntimeError: Error building extension\\n[1/2] c++ ...\\nkernel.cpp:7:1: error: expected ;\\n"
    replace(runs[0] / LOG, '"reason": "it is"', f'"reason": "{wrong}"')
    code = Workspace(runs[0], 4, 2).frozen
    write_files(code.parent, [code.name])
    shown = expect(0, "", "report", *runs)
    lines = shown.output.splitlines()
    assert lines[0].split()[:5] == ["tasks", "attempts", "pass@1", "pass@2", "pass@4"]
    assert lines[1].split()[:3] == ["all", "2", "8"]
    for words in (
        "2 planned attempts are not finished and left out.",
        "one, attempt 1, try 1 (agent-1): wrong: it raised RuntimeError: Error building extension ... kernel.cpp:7:1:",
        "one, attempt 4, try 2 (agent-0): right, 4.00 (4.00 to 4.00)",
        f"code: {code}",
        f"log:  {Workspace(runs[0], 4, 2).log}",
    ):
        assert words in shown.output, shown.output
    answer = json.loads(invoke("report", *runs, "--json").stdout)
    assert answer["groups"][0]["pass-at"]["1"] == pytest.approx(0.625)
    assert len(answer["attempts"]) == 8


@pytest.mark.attack
def test_the_page_of_a_search_has_its_code_and_no_private_data(runs: list[Path], tmp_path: Path) -> None:
    """Not the arguments of agents, which may be keys, and no file behind a link."""
    log, workspace = runs[0] / LOG, Workspace(runs[0], 4, 2)
    text = log.read_text().replace('"agent-0"', '"./my-agent --key hf_secret"')
    log.write_text(text.replace('"agent-1"', '"/bin/my-agent hf_secret"'))
    write_files(workspace.frozen.parent, {workspace.frozen.name: "class ModelNew: the_code = 1\n"})
    workspace.log.write_text("x" * 30_000 + "the end of the log")
    command = ["report", runs[0], "--out", tmp_path / "site"]
    expect(0, "", *command)
    page = (tmp_path / "site" / "index.html").read_text()
    assert "rank 1: attempt 4, try 2, my-agent 2" in page and "the_code = 1" in page and "the end of the log" in page
    shown = invoke(*command[:2]).output + invoke(*command[:2], "--json").output
    assert "my-agent 1" in shown and "hf_secret" not in page + shown
    (tmp_path / "secret").write_text("hf_secret")
    workspace.log.unlink()
    workspace.log.symlink_to(tmp_path / "secret")
    expect(2, "agent.log: cannot be read", *command)


def test_a_directory_without_a_search_is_refused(tmp_path: Path) -> None:
    assert "hint: " in expect(2, "there is no log.jsonl", "report", tmp_path).stderr


def test_a_report_needs_a_finished_attempt(tmp_path: Path) -> None:
    write_run(tmp_path / "one", "one", [])
    with pytest.raises(ConfigError, match="no attempt is finished"):
        make_report([tmp_path / "one"], "eager")
