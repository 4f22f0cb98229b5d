"""The supervisor: limits, feedback, exclusive judging, its log, and how a search goes on that was killed."""

from __future__ import annotations

import json
import re
import resource
import secrets
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from searches import agent, logged, marked_processes, quick_request, quoted, run_search, start_search

from kernel_format.errors import ConfigError, StoreError
from kernel_format.files import remove_tree
from kernel_judge.search.run_log import LOG, RunLog, read_events
from kernel_judge.search.workspace import Workspace
from kernel_sandbox.confine import landlock_version
from tests.support.programs import wait_for

pytestmark = pytest.mark.usefixtures("judge_calls")

GOOD, SLOW, WRONG = quoted("# right 2.5"), quoted("# right 0.5"), quoted("# wrong")


def test_the_good_agent_wins(tmp_path: Path) -> None:
    result = run_search(quick_request(tmp_path, agent("crashing"), WRONG, GOOD, SLOW, jobs=4))
    assert result.best and (result.best["attempt"], result.best["speed"]) == (3, 2.5)
    outcomes = {event["attempt"]: event["outcome"] for event in logged(result.run, "try-ended")}
    assert outcomes == {1: "no-candidate", 2: "wrong", 3: "right", 4: "right"}
    assert marked_processes(result.run) == []


def test_an_error_in_one_attempt_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = Workspace.prepare
    monkeypatch.setattr(
        Workspace, "prepare", lambda self, *given: prepare(self, *given) if "/0002/" in f"{self.root}" else 1 / 0
    )
    best = run_search(quick_request(tmp_path, SLOW, GOOD)).best
    assert best and best["attempt"] == 2


def test_nothing_is_best_that_is_not_faster_than_the_reference(tmp_path: Path) -> None:
    result = run_search(quick_request(tmp_path, SLOW, WRONG))
    assert result.best is None
    assert not (result.run / "best").exists()
    assert logged(result.run, "verified") == []


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("crashing", {}, "something went wrong"),
        ("filling", {"disk": 50_000_000}, "its limit of disk"),
        ("deep", {}, "its limit of disk"),
        ("greedy", {"memory": 1_000_000_000}, "MemoryError"),
        ("hanging", {"seconds": 1}, "its limit of time. It wrote no candidate"),
        ("odd", {}, "It wrote no candidate that can be copied: regular files, at most 10,000 files"),
    ],
)
def test_the_next_try_receives_the_failure(tmp_path: Path, kind: str, settings: dict[str, Any], message: str) -> None:
    request = quick_request(tmp_path, agent(kind), tries=2, **settings)
    assert run_search(request).best is None
    workspace = Workspace(request.run, 1, 2).directory
    prompt = (workspace / "PROMPT.md").read_text()
    assert message in prompt
    assert "It wrote no candidate that can be copied: regular files, at most 10,000 files" in prompt
    assert marked_processes(request.run) == []
    remove_tree(request.run)  # pytest cannot remove directories of any depth


@pytest.mark.parametrize(("kind", "limit", "stopped"), [("escaping", 120, None), ("forking", 2, "time")])
def test_nothing_that_an_agent_starts_outlives_its_call(
    tmp_path: Path, kind: str, limit: float, stopped: str | None
) -> None:
    """Whatever it clears, leaves and kills. Its processes are known by a number of seconds that nothing else has."""
    kills = "its guard" if landlock_version() >= 6 else ""
    seconds = f"300.{secrets.randbelow(10**9):09}"
    run = run_search(quick_request(tmp_path, agent(kind, kills, seconds), seconds=limit)).run
    (ended,) = logged(run, "agent-ended")
    assert ended["stopped"] == stopped and ended["exit-status"] == (0 if stopped is None else -signal.SIGKILL)
    assert [path for path in Path("/proc").glob("[0-9]*/cmdline") if seconds.encode() in path.read_bytes()] == []


def test_a_try_knows_the_verdict_on_the_one_before_and_goes_on_with_its_files(tmp_path: Path) -> None:
    run = run_search(quick_request(tmp_path, WRONG, tries=2)).run
    workspace = Workspace(run, 1, 2).directory
    prompt = (workspace / "PROMPT.md").read_text()
    assert "wrong-result: it is wrong on purpose" in prompt
    assert {path.name for path in workspace.iterdir()} == {"PROMPT.md", "task", "kernel", "judge", "candidate.py"}
    assert (workspace / "kernel" / "build.toml").is_file()
    assert (workspace / "task" / "hard_swish_steps.py").is_file()
    first = Workspace(run, 1, 1).frozen_candidate()
    assert first and "/0001/1/workspace" in first.read_text()


def test_judging_is_exclusive(tmp_path: Path, judge_calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUICK_JUDGE_SECONDS", "0.1")
    other = tmp_path / "other"
    other.mkdir()
    beside = start_search(other, WRONG, attempts=2, jobs=2)
    run_search(quick_request(tmp_path, WRONG, attempts=3, jobs=3))
    assert beside.wait(120) == 0
    times = sorted(tuple(map(float, line.split()[1:])) for line in judge_calls.read_text().splitlines())
    assert len(times) == 5
    assert all(end <= start for (_, end), (start, _) in pairwise(times))


def test_a_judge_that_fails_is_no_verdict(tmp_path: Path) -> None:
    request = quick_request(tmp_path, quoted("# broken"), GOOD, tries=2)
    assert run_search(request).best
    assert "no such device" in (Workspace(request.run, 1, 2).directory / "PROMPT.md").read_text()
    stuck = quick_request(tmp_path, quoted("# stuck"), judge_seconds=2, run=tmp_path / "stuck")
    (ended,) = logged(run_search(stuck).run, "try-ended")
    assert "longer than 2 s" in ended["judged"]["error"]


def test_a_killed_search_goes_on(tmp_path: Path, judge_calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUICK_JUDGE_SECONDS", "0.05")
    agents, settings = (GOOD, SLOW, WRONG), {"attempts": 6, "tries": 2, "jobs": 3}
    log = tmp_path / "run" / LOG
    for goal in (1, 4, 7):
        process = start_search(tmp_path, *agents, **settings)
        assert wait_for(lambda goal=goal: log.exists() and log.read_bytes().count(b'"event":"try-ended"') >= goal)
        process.send_signal(signal.SIGKILL)
        process.wait()
    with log.open("ab") as torn:
        torn.write(b'{"event":"try-ended","attempt":')
    result = run_search(quick_request(tmp_path, *agents, **settings))
    tries = [(event["attempt"], event["try"]) for event in logged(result.run, "try-ended")]
    assert sorted(tries) == [(attempt, number) for attempt in range(1, 7) for number in (1, 2)]
    assert result.best and result.best["speed"] == 2.5
    judged = [event["candidate"] for event in logged(result.run, "try-ended")]
    # One candidate is judged at a time, so each kill interrupts at most one judging, which begins again.
    calls = re.findall(r"[0-9a-f]{64}", judge_calls.read_text())
    assert len(judged) <= len(calls) - len(logged(result.run, "verified")) <= len(judged) + 3
    assert marked_processes(result.run) == []
    before = (tmp_path / "judge-calls").read_bytes()
    run_search(quick_request(tmp_path, *agents, **settings))
    assert (tmp_path / "judge-calls").read_bytes() == before


def test_a_stopped_search_leaves_no_process(tmp_path: Path) -> None:
    process = start_search(tmp_path, agent("hanging"))
    assert wait_for(lambda: len(marked_processes(tmp_path / "run")) >= 2)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) != 0
    assert marked_processes(tmp_path / "run") == []
    assert logged(tmp_path / "run", "agent-ended") == []


def test_more_attempts_continue_a_search_and_other_settings_do_not(tmp_path: Path) -> None:
    run_search(quick_request(tmp_path, WRONG, attempts=1))
    result = run_search(quick_request(tmp_path, WRONG, attempts=2))
    assert [event["attempt"] for event in logged(result.run, "try-ended")] == [1, 2]
    with pytest.raises(ConfigError, match="with `agents`"):
        run_search(quick_request(tmp_path, GOOD))
    changed = quick_request(tmp_path, WRONG)
    changed.task.write_text(changed.task.read_text().replace("1024", "2048"))
    with pytest.raises(ConfigError, match="with `task-digest`"):
        run_search(changed)


def test_two_searches_cannot_use_one_directory(tmp_path: Path) -> None:
    process = start_search(tmp_path, agent("hanging"))
    try:
        assert wait_for((tmp_path / "run" / LOG).exists)
        with pytest.raises(ConfigError, match="another search is running"):
            run_search(quick_request(tmp_path, agent("hanging")))
    finally:
        process.kill()
        process.wait()


def test_an_agent_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no program 'no-such-agent'"):
        run_search(quick_request(tmp_path, "no-such-agent -p"))
    assert not (tmp_path / "run").exists()


def test_the_log_ends_with_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / LOG
    log = RunLog(path)
    log.append("one", value=1)
    log.close()
    with path.open("ab") as torn:
        torn.write(b'{"event":"two"')
    assert [event["event"] for event in read_events(path)] == ["one"]
    log = RunLog(path)
    log.append("three")
    size, limit = path.stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, limit[1]))
    try:
        with pytest.raises(StoreError, match="cannot be written: File too large"):
            log.append("torn")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    log.close()
    assert [json.loads(line)["event"] for line in path.read_text().splitlines()] == ["one", "three"]
    path.write_text("[]\n")
    with pytest.raises(ConfigError, match=r"line 1: is not an event"):
        read_events(path)
