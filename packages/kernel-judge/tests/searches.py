"""Searches with agents that follow a script, in this process or in one that can be killed."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from kernel_builder import toml_file
from kernel_judge.search import search_run
from kernel_judge.search.limited_process import Limits
from kernel_judge.search.run_log import LOG, Event, read_events
from kernel_judge.search.search_request import GIGABYTE, SearchRequest
from kernel_judge.search.search_run import SearchResult

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
TASK = toml_file.read(HERE / "small_tasks.toml")["hard_swish"]
QUICK_JUDGE = (sys.executable, str(HERE / "quick_judge.py"))


def agent(kind: str, *arguments: str) -> str:
    """Return the command of a scripted agent."""
    return shlex.join([sys.executable, str(HERE / "agents.py"), kind, *arguments])


def quoted(text: str, seconds: float = 0.05) -> str:
    """Return the command of an agent whose candidate is this text, and other for each try; it takes a time."""
    return agent("quoted", f"{text}\n# {{workspace}}\n", str(seconds))


def write_task(directory: Path) -> Path:
    """Write the task that the agents solve: hard swish in four steps."""
    task = directory / "hard_swish_steps.py"
    task.write_text(TASK)
    return task


def quick_request(directory: Path, *agents: str, **settings: Any) -> SearchRequest:
    """Return the request of a search in a directory, with a judge that takes no time."""
    limits = Limits(settings.pop("seconds", 60), settings.pop("memory", 4 * GIGABYTE), settings.pop("disk", GIGABYTE))
    own = {"task": write_task(directory), "run": directory / "run", "agents": agents, "attempts": len(agents)}
    return SearchRequest(**(own | {"jobs": 2, "judge": QUICK_JUDGE, "limits": limits} | settings))


def run_search(request: SearchRequest) -> SearchResult:
    """Run a search, with its messages in the test's output."""
    return search_run.run_search(request, print)


def start_search(directory: Path, *agents: str, **settings: Any) -> subprocess.Popen[bytes]:
    """Start a search in another process."""
    arguments = json.dumps([str(directory), agents, settings])
    return subprocess.Popen([sys.executable, __file__, arguments], cwd=ROOT)


def logged(run: Path, event: str) -> list[Event]:
    """Return the events of a kind in the log of a search."""
    return [entry for entry in read_events(run / LOG) if entry["event"] == event]


def marked_processes(run: Path) -> list[int]:
    """Return the live processes of agents and judges of a search, by their directories and arguments."""
    processes = []
    for process in psutil.process_iter(["cwd", "cmdline"]):
        places = [process.info["cwd"] or "", *(process.info["cmdline"] or ())]
        if any(place.startswith(f"{run}/attempts/") for place in places):
            processes.append(process.pid)
    return processes


if __name__ == "__main__":
    where, commands, chosen = json.loads(sys.argv[1])
    run_search(quick_request(Path(where), *commands, **chosen))
