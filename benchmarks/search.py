"""Whether a search that is killed loses or repeats anything, and what the supervisor costs.

    python benchmarks/search.py [--attempts 200] [--kills 5] [--json benchmarks/results/search.json]

Agents of six kinds take turns: good, slow, wrong, cheating, hanging, crashing. The search is killed with SIGKILL at
points spread over the run, and started again with the same command. The judge is a stand-in that believes what a
candidate says of itself: the figures are those of the supervisor, its log and its locks.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "packages/kernel-judge/tests")]

import result_files  # noqa: E402
from figures import machine  # noqa: E402
from searches import agent, marked_processes, quoted, start_search  # noqa: E402

from kernel_judge.search.run_log import LOG, read_events  # noqa: E402
from kernel_judge.search.run_report import make_report  # noqa: E402

TRIES, JOBS = 2, 16
AGENT_SECONDS, LIMIT_SECONDS = 3.0, 6.0
KINDS = {
    "good": quoted("# right 2.5", AGENT_SECONDS),
    "slow": quoted("# right 0.5", AGENT_SECONDS),
    "wrong": quoted("# wrong", AGENT_SECONDS),
    "cheating": quoted("# wrong: claims to be right", AGENT_SECONDS),
    "hanging": agent("hanging"),
    "crashing": agent("crashing"),
}


def ended(log: Path) -> int:
    """Return how many tries are in the log."""
    return log.read_bytes().count(b'"event":"try-ended"') if log.exists() else 0


def run(directory: Path, attempts: int, kills: int) -> None:
    """Run a search to its end, and kill it on the way."""
    goals = [attempts * TRIES * number // (kills + 1) for number in range(1, kills + 1)]
    settings = {"attempts": attempts, "tries": TRIES, "jobs": JOBS, "seconds": LIMIT_SECONDS}
    for goal in [*goals, None]:
        process = start_search(directory, *KINDS.values(), **settings)
        if goal is None:
            if process.wait():
                raise SystemExit("the search failed")
            return
        while ended(directory / "run" / LOG) < goal:
            if process.poll() is not None:
                raise SystemExit("the search ended before it was killed")
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
        print(f"killed after {ended(directory / 'run' / LOG)} tries", file=sys.stderr)


def figures(directory: Path, attempts: int) -> dict[str, Any]:
    """Return what was lost and repeated, and the supervisor's share of the time."""
    events = read_events(directory / "run" / LOG)
    tries = Counter((event["attempt"], event["try"]) for event in events if event["event"] == "try-ended")
    calls = len(re.findall(r"[0-9a-f]{64}", (directory / "calls").read_text()))
    verdicts = Counter(
        event["candidate"]
        for event in events
        if event["event"] == "try-ended" and event["judged"] and not event["judged-as"]
    )
    verified = sum(event["event"] == "verified" for event in events)
    wanted = {(attempt, number) for attempt in range(1, attempts + 1) for number in range(1, TRIES + 1)}
    starts = sum(event["event"] == "started" for event in events)
    best = events[-1]["best"]
    return {
        "attempts": attempts,
        "tries": len(wanted),
        "starts": starts,
        "lost": len(wanted - set(tries)),
        "repeated": sum(count - 1 for count in tries.values()),
        "judged": len(verdicts),
        "judged-twice": sum(count - 1 for count in verdicts.values()),
        # Killed with the search before they had a verdict, and begun again: at most one for a kill.
        "judgings-interrupted": calls - sum(verdicts.values()) - verified,
        "verified": verified,
        "outcomes": dict(Counter(event["outcome"] for event in events if event["event"] == "try-ended")),
        "best-is-good": best is not None and best["agent"] == KINDS["good"],
        "processes-left": len(marked_processes(directory / "run")),
        "overhead": make_report([directory / "run"], "eager").overhead,
        "agent-seconds": sum(event["agent-seconds"] for event in events if event["event"] == "try-ended"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attempts", type=int, default=200)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "search.json")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        os.environ |= {"QUICK_JUDGE_CALLS": f"{scratch}/calls", "KERNEL_BUILDER_CACHE": f"{scratch}/cache"}
        started = time.monotonic()
        run(directory, chosen.attempts, chosen.kills)
        measured = figures(directory, chosen.attempts)
        measured["seconds"] = round(time.monotonic() - started, 1)
    about = {"date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "machine": machine(), "jobs": JOBS}
    result_files.write(chosen.json, {**about, **measured})
    print(json.dumps(measured, indent=2))


if __name__ == "__main__":
    main()
