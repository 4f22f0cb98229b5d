"""Figures of the judge: cheats rejected, honest candidates passed, under repetition; problems of KernelBench judged.

    python benchmarks/judge.py candidates --times 50        writes benchmarks/results/judge_candidates_cpu.json
    python benchmarks/judge.py kernelbench CHECKOUT         writes benchmarks/results/judge_kernelbench.json
    python benchmarks/judge.py verdict                      writes benchmarks/results/judge_verdict.json

`candidates` judges the cheats and the honest candidates of packages/kernel-judge/tests. `kernelbench` judges the
reference of each problem against itself, renamed to ModelNew. `verdict` times whole verdicts with all inputs, rounds
and peers.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
sys.path[:0] = [str(ROOT), str(ROOT / "packages/kernel-judge/tests")]

import result_files  # noqa: E402
from judge_samples import CHEATS, GPU_CHEATS, GPU_HONEST, HERE, HONEST, note, quick, scale_project, task_of  # noqa: E402

if TYPE_CHECKING:
    from kernel_judge.judge.judgement import JudgeRequest


def judged(candidate: Path, task: Path, *options: str, seconds: float = 300) -> dict:
    """Return a verdict, or the error of the judge."""
    command = [sys.executable, "-m", "kernel_builder", "judge", candidate, "--task", task, "--json", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    started = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"error": "Timeout", "message": f"no verdict within {seconds:.0f} s", "seconds": seconds}
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        answer = {"error": "Crash", "message": done.stderr.strip().splitlines()[-1:]}
    return {**answer, "whole-seconds": time.monotonic() - started}


def machine() -> dict:
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {
        "device": device,
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }


def save(name: str, document: dict) -> None:
    RESULTS.mkdir(exist_ok=True)
    result_files.write(_result(name), {**machine(), **document})


def _result(name: str) -> Path:
    return RESULTS / f"judge_{name}.json"


def rejection(request: JudgeRequest) -> tuple[str, str]:
    """Judge a candidate in this process. Return as what it is rejected, or "right", and why."""
    import torch

    from kernel_format.errors import KernelBuilderError
    from kernel_judge.judge.judgement import judge

    torch.set_num_threads(1)  # of the candidate, too: the judgements beside it have the other cores
    try:
        verdict = judge(request)
    except KernelBuilderError as error:
        return f"error: {error}", str(error)
    return verdict.rejected_as or "right", verdict.reason


def candidates(arguments: argparse.Namespace) -> None:
    """Judge cheats and honest candidates several times, and count the unexpected verdicts."""
    on_gpu = arguments.device == "cuda"
    cheats = [*CHEATS, *(GPU_CHEATS if on_gpu else ())]
    honest = [*HONEST, *(GPU_HONEST if on_gpu else ())]
    cheats, honest = (
        [file for file in files if note(file, "device") in ("", arguments.device)] for files in (cheats, honest)
    )
    expected = {file: note(file, "rejected-as") for file in cheats} | dict.fromkeys(honest, "right")
    spawned = get_context("spawn")
    processes = ProcessPoolExecutor(arguments.jobs, spawned)  # Torch is imported once in each
    # Where a GPU is shared, a candidate waits for others in every call, whether it computes or not.
    alone = ProcessPoolExecutor(1, spawned) if on_gpu else processes
    with tempfile.TemporaryDirectory() as directory, processes, alone:
        project = scale_project(Path(directory))
        requests = {file: quick(file, device=arguments.device) for file in expected}
        requests[project] = dataclasses.replace(
            quick(HONEST[0], device=arguments.device), candidate=project, task=HERE / "tasks" / "scaled.py"
        )
        expected[project] = "right"
        counts: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
        unexpected: list[dict] = []
        if arguments.only:
            saved = json.loads(_result(f"candidates_{arguments.device}").read_text())
            requests = {file: request for file, request in requests.items() if file.stem in arguments.only}
            again = set(map(_name, requests))
            counts |= {name: collections.Counter(n) for name, n in saved["verdicts"].items() if name not in again}
            unexpected = [entry for entry in saved["unexpected"] if entry["candidate"] not in again]
        for times in range(1, arguments.times + 1):
            timed = {file for file, request in requests.items() if request.rounds}
            for pool, files in ((processes, requests.keys() - timed), (alone, timed)):
                chosen = sorted(files)
                answers = pool.map(rejection, [requests[file] for file in chosen])
                for file, (kind, reason) in zip(chosen, answers, strict=True):
                    counts[_name(file)][kind] += 1
                    if kind != expected[file]:
                        unexpected.append({"candidate": _name(file), "found": kind, "reason": reason})
                        print(f"unexpected: {unexpected[-1]}", flush=True)
            _save_candidates(arguments.device, cheats, counts, unexpected)
            print(f"{times} of {arguments.times}", flush=True)


def _save_candidates(device: str, cheats: list, counts: dict, unexpected: list) -> None:
    """Write what is known after some repetitions, so that a run which is ended early counts for those."""
    wrong = [entry for entry in unexpected if entry["candidate"] in set(map(_name, cheats))]
    passed_by_mistake = [entry for entry in wrong if entry["found"] == "right"]
    save(
        f"candidates_{device}",
        {
            "times": min(sum(count.values()) for count in counts.values()),
            "cheats": len(cheats),
            "honest": len(counts) - len(cheats),
            "cheats-passed": len(passed_by_mistake),
            "cheats-by-another-name": len(wrong) - len(passed_by_mistake),
            "honest-rejected": len(unexpected) - len(wrong),
            "unexpected": unexpected,
            "verdicts": {name: dict(count) for name, count in sorted(counts.items())},
        },
    )


def _name(file: Path) -> str:
    """Return the candidate's name, after that of its directory."""
    parent = file.parent.parent.name if file.parent.parent.name == "gpu" else ""
    return f"{parent} {file.parent.name} {file.stem}".strip() if file.is_file() else "honest project"


def kernelbench(arguments: argparse.Namespace) -> None:
    """Judge each problem's own model, renamed to ModelNew."""
    from kernel_judge.judge.task import kernelbench as problems

    tasks = list(problems(arguments.checkout, arguments.levels))
    known = {}
    if arguments.again:
        rows = json.loads((RESULTS / "judge_kernelbench.json").read_text())["problems"]
        known = {(row["level"], row["problem"]): row for row in rows if row["verdict"] == "right"}
    options = ["--inputs", str(arguments.inputs), "--rounds", str(arguments.rounds), "--against", "eager"]

    def verdict_on(task):
        if (task.level, task.name) in known:
            return None
        with tempfile.TemporaryDirectory() as directory:
            candidate = Path(directory, "candidate.py")
            candidate.write_text(task.source + "\n\nModelNew = Model\n")
            return judged(candidate, task.path, *options, seconds=arguments.seconds)

    rows = []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for task, verdict in zip(tasks, pool.map(verdict_on, tasks), strict=True):
            if verdict is None:
                rows.append(known[task.level, task.name])
                continue
            reason = verdict.get("message") or verdict.get("reason") or ""
            row = {
                "level": task.level,
                "problem": task.name,
                "verdict": verdict.get("verdict"),
                "rejected-as": verdict.get("rejected-as"),
                "reason": str(reason)[:300],
                "seconds": round(verdict.get("seconds", 0), 1),
            }
            rows.append(row)
            print(row, flush=True)
    counts = collections.Counter((row["level"], row["verdict"] or "no verdict") for row in rows)
    summary = [{"level": level, "verdict": verdict, "count": n} for (level, verdict), n in sorted(counts.items())]
    print(summary)
    save("kernelbench", {"inputs": arguments.inputs, "rounds": arguments.rounds, "counts": summary, "problems": rows})


def verdict(arguments: argparse.Namespace) -> None:
    """Time whole verdicts on honest candidates, with all inputs, rounds and peers."""
    rows = []
    for file in HONEST:
        verdict = judged(file, task_of(file))
        speed = {name: round(speedup["ratio"], 3) for name, speedup in verdict.get("speed", {}).items()}
        rows.append(
            {
                "candidate": file.stem,
                "verdict": verdict.get("verdict"),
                "seconds": verdict.get("seconds"),
                "speed": speed,
            }
        )
        print(rows[-1], flush=True)
    save("verdict", {"verdicts": rows})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-j", "--jobs", type=int, default=1)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("candidates")
    command.add_argument("--times", type=int, default=50)
    command.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    command.add_argument(
        "--only", nargs="+", default=[], help="only these candidates; the saved results of others stay"
    )
    command.set_defaults(run=candidates)
    command = commands.add_parser("kernelbench")
    command.add_argument("checkout", type=Path)
    command.add_argument("--levels", type=int, nargs="+", default=[1, 2])
    command.add_argument("--seconds", type=float, default=180)
    command.add_argument(
        "--again", action="store_true", help="only the problems that were not right in the saved results"
    )
    command.add_argument("--inputs", type=int, default=12)
    command.add_argument("--rounds", type=int, default=1)
    command.set_defaults(run=kernelbench)
    command = commands.add_parser("verdict")
    command.set_defaults(run=verdict)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
