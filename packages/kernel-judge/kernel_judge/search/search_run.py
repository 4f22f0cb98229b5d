"""A search from its request to `best/`: set up its directory, make the attempts, verify and write the best kernel."""

from __future__ import annotations

import threading
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kernel_format.errors import ConfigError
from kernel_format.files import locked
from kernel_judge.judge.verdict import Notify
from kernel_judge.search import best_kernel
from kernel_judge.search.local_judge import judging_devices, open_judge
from kernel_judge.search.run_log import FINISHED, LOG, STARTED, RunLog
from kernel_judge.search.search_request import SearchRequest, agent_command
from kernel_judge.search.supervisor import Supervisor, prepare, repo_id
from kernel_judge.search.workspace import task_path
from kernel_tasks import Task, read_task

_PATIENCE = 2.0  # seconds


@dataclass(frozen=True)
class SearchResult:
    """The result of a search. `best` is None if the reference is the best."""

    run: Path
    best: dict[str, Any] | None


def run_search(request: SearchRequest, notify: Notify) -> SearchResult:
    """Make the attempts that are left, verify the fastest right candidate, and write it to `best/`."""
    task = read_task(request.task)
    for agent in request.agents:
        agent_command(agent)  # before anything is made
    request = replace(request, run=request.run.absolute())
    request.run.mkdir(parents=True, exist_ok=True)
    # A child of a killed search has its lock until it has become another program.
    lock = locked(request.run / "lock", waiting=partial(_refuse, request.run), patience=_PATIENCE)
    with lock, closing(RunLog(request.run / LOG)) as log:
        return _search(request, task, log, notify)


def _search(request: SearchRequest, task: Task, log: RunLog, notify: Notify) -> SearchResult:
    settings = request.fixed() | {"task": task.name, "task-digest": task.digest}
    before = log.find(STARTED)
    for key, value in settings.items() if before else ():
        if before and before[key] != value:
            raise ConfigError(
                f"this search was started with `{key}` {before[key]!r}, not {value!r}",
                where=str(request.run),
                hint="go on with the same, or name another directory with --run",
            )
    backends = _backends(request, task)
    if not before:
        prepare(request, task, backends)
    judging = request.judge_settings()
    stopping = threading.Event()
    with open_judge(judging, task_path(request.run), stopping.is_set) as judge:
        log.append(STARTED, **settings, attempts=request.attempts, judge=judging, version=version("torch-kernel-judge"))
        Supervisor(request, task, judge, log, notify, stopping).run()
        chosen = best_kernel.choose(log, judge, request.run, notify)
    best = None
    if chosen:
        made, verdict = chosen
        best_kernel.write_best(made, verdict, repo_id=repo_id(task), backends=backends)
        best = {"attempt": made.attempt, "try": made.number, "agent": made.agent, "candidate": made.candidate}
        best |= {"speed": verdict.ratio, "verdict": verdict.as_dict()}
    log.append(FINISHED, best=best)
    return SearchResult(request.run, best)


def _backends(request: SearchRequest, task: Task) -> tuple[str, ...]:
    """Return the backends of the kernel: those of the device that judges, or both if that is not known."""
    if task.settings.device:
        return (task.settings.device,)
    if request.ray:
        return ("cpu", "cuda")
    return ("cpu",) if "cpu" in judging_devices() else ("cuda",)


def _refuse(run: Path) -> None:
    raise ConfigError("another search is running in it", where=str(run), hint="wait for its end, or use another --run")
