"""What the tasks of KernelBench leave open, and whether the judge passes their own models.

    python benchmarks/kernelbench.py CHECKOUT        writes benchmarks/results/kernelbench.json

It counts what hides mistakes: inputs that are never negative, parameters that are ones or zeros, shapes that no size
of the file changes. Sizes are halved until inputs and parameters are small, and no model is run for this. Then each
problem is judged with its own model, renamed to ModelNew, on the CPU; all run in one worker, one after another. Nothing
of the checkout is copied.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import platform
import random
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import result_files
import torch

from kernel_format.errors import ConfigError
from kernel_judge.judge.evaluation import randomize, without_tensors
from kernel_judge.judge.judgement import prepare_references
from kernel_judge.judge.result_checks import RejectedError, ResultChecks
from kernel_judge.judge.task import Sizes, Task, kernelbench
from kernel_judge.judge.verdict import RIGHT
from kernel_judge.judge.worker_process import WorkerFailure, WorkerProcess
from kernel_sandbox import sandbox

RESULTS = Path(__file__).resolve().parent / "results" / "kernelbench.json"
HEAVY, MOST_BYTES = 1 << 24, 1 << 30  # of inputs and parameters together
SURVEY_SECONDS = 60
TOO_LARGE, TOO_LONG = "too large", "too long"


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in the block after a time."""

    def stop(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def weight(task: Task, sizes: Sizes) -> float:
    """Return the bytes of inputs and parameters, which get no values; infinity if the model refuses that."""
    try:
        problem, tensors = task.problem(sizes), list[torch.Tensor]()
        with torch.device("meta"):
            without_tensors(problem.get_inputs(), tensors)
            tensors += problem.Model(*problem.get_init_inputs()).state_dict().values()
    except Exception:
        return math.inf
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def shapes(task: Task, sizes: Sizes) -> list[torch.Size]:
    problem, tensors = task.problem(sizes), list[torch.Tensor]()
    with torch.device("meta"):
        without_tensors(problem.get_inputs(), tensors)
    return [tensor.shape for tensor in tensors]


def shrunk(task: Task) -> Sizes:
    """Return the sizes of a task, the largest ones halved while that makes it lighter and it is heavy."""
    sizes, fixed = task.sizes(), set[str]()
    least = weight(task, sizes)
    while least > HEAVY:
        free = {name: size for name, size in sizes.items() if type(size) is int and size > 1 and name not in fixed}
        if not free:
            break
        name = max(free, key=lambda name: free[name])
        other = {**sizes, name: sizes[name] // 2}
        if (lighter := weight(task, other)) < least:
            sizes, least = other, lighter
        else:
            fixed.add(name)
    return sizes


def moves(task: Task, sizes: Sizes, name: str) -> bool:
    """Return whether another value of a size gives inputs of other shapes."""
    value = sizes[name]
    other = tuple(item + 1 for item in value) if isinstance(value, tuple) else value + 1
    try:
        return shapes(task, {**sizes, name: other}) != shapes(task, sizes)
    except Exception:
        return False


def survey(task: Task) -> dict:
    """Return what a task's inputs, parameters and shapes are, without running its model; or why that was left out."""
    row = {"level": task.level, "problem": task.name}
    try:
        with limited(SURVEY_SECONDS):
            sizes = shrunk(task)
            if MOST_BYTES < weight(task, sizes) < math.inf:  # infinite if it reads values when it is constructed
                return row | {"left-out": TOO_LARGE}
            problem = task.problem(sizes)
            torch.manual_seed(1)
            inputs: list[torch.Tensor] = []
            without_tensors(problem.get_inputs(), inputs)
            floating = [tensor for tensor in inputs if tensor.is_floating_point()]
            model = problem.Model(*problem.get_init_inputs())
            return row | {
                "inputs": len(floating),
                "never-negative": bool(floating) and all(bool((tensor >= 0).all()) for tensor in floating),
                "parameters": len(list(model.parameters())),
                "ones-or-zeros": len(randomize(model, 1)),
                "literal-shapes": not any(moves(task, sizes, name) for name in sizes),
            }
    except TimeoutError:
        return row | {"left-out": TOO_LONG}
    except Exception as error:  # of the problem's own code
        return row | {"left-out": str(error).replace(f"{task.path}: ", "")[:300]}


def judged(task: Task, worker: WorkerProcess, inputs: int, seed: int) -> dict:
    """Judge a task's own model."""
    choice = random.Random(seed)
    references, _ = prepare_references(task, "cpu", choice)
    candidate = worker.scratch / "candidate.py"
    candidate.write_text(task.source + "\n\nModelNew = Model\n")
    try:
        worker.ask("load", str(candidate), "ModelNew", seconds=60)
        for number, reference in enumerate(references):
            worker.ask("model", number, *reference.model_arguments(), seconds=60)
        examination = ResultChecks(worker, references, task.settings.tolerance, 30)
        examination.check([choice.getrandbits(48) for _ in range(inputs)])
        examination.check_outside(task, choice.getrandbits(48), 60)
    except RejectedError as error:
        return {"verdict": error.kind, "reason": str(error)[:300]}
    return {"verdict": RIGHT}


def verdicts(tasks: list[Task], arguments: argparse.Namespace) -> Iterator[dict]:
    """Yield what judging each task's own model gives, until the time is over."""
    started = time.monotonic()
    with ExitStack() as stack:
        worker: WorkerProcess | None = None
        for task in tasks:
            if time.monotonic() - started > 60 * arguments.minutes:
                return
            try:
                if worker is None:
                    threads = torch.get_num_threads()
                    worker = stack.enter_context(WorkerProcess(sandbox.strongest(), "cpu", threads=threads))
                    worker.ready(120)
                with limited(arguments.seconds):
                    row = judged(task, worker, arguments.inputs, arguments.seed)
            except ConfigError as error:
                is_late = TimeoutError.__name__ in str(error)  # in a call of the reference
                row = {"verdict": TOO_LONG if is_late else TOO_LARGE, "reason": str(error)[:300]}
            except TimeoutError:
                row = {"verdict": TOO_LONG}
            except WorkerFailure as failure:
                row = {"verdict": failure.kind, "reason": str(failure)[:300]}
            except Exception as error:  # of the problem's own code
                row = {"verdict": "cannot be run", "reason": f"{type(error).__name__}: {error}"[:300]}
            if row["verdict"] not in (RIGHT, TOO_LARGE):  # it may be at work, or gone
                stack.close()
                worker = None
            if "reason" in row:
                row["reason"] = row["reason"].replace(f"{task.path}: ", "")
            yield row


def counted(level: list[dict]) -> dict:
    """Return the figures of a level for the table in docs/judge.md."""
    looked_at = [row for row in level if "left-out" not in row]
    return {
        "problems": len(level),
        "looked-at": len(looked_at),
        "with-inputs": sum(row["inputs"] > 0 for row in looked_at),
        "never-negative": sum(row["never-negative"] for row in looked_at),
        "with-parameters": sum(row["parameters"] > 0 for row in looked_at),
        "ones-or-zeros": sum(row["ones-or-zeros"] > 0 for row in looked_at),
        "literal-shapes": sum(row["literal-shapes"] for row in looked_at),
        "verdicts": dict(collections.Counter(row["verdict"] for row in level if "verdict" in row).most_common()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--levels", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--inputs", type=int, default=4, help="random inputs of the task's own kind")
    parser.add_argument("--seconds", type=int, default=90, help="limit of judging one problem")
    parser.add_argument("--minutes", type=float, default=math.inf, help="judge no problem after this time")
    parser.add_argument("--go-on", action="store_true", help="keep what the saved results have")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    levels = {level: list(kernelbench(arguments.checkout, [level])) for level in arguments.levels}
    saved = json.loads(RESULTS.read_text())["problems"] if arguments.go_on else []
    known = {(row["level"], row["problem"]): row for row in saved}
    rows = {}
    for task in [task for tasks in levels.values() for task in tasks]:
        rows[task.path] = known.get((task.level, task.name)) or survey(task)
        print(rows[task.path], flush=True)
    save(arguments, levels, rows)
    # Problems of all levels in turn, so that a run that is ended early has judged a part of each.
    places = [(place / len(tasks), task) for tasks in levels.values() for place, task in enumerate(tasks)]
    order = [task for _, task in sorted(places, key=lambda pair: pair[0]) if "verdict" not in rows[task.path]]
    for task, verdict in zip(order, verdicts(order, arguments), strict=False):
        rows[task.path] |= verdict
        print(rows[task.path], flush=True)
        save(arguments, levels, rows)
    save(arguments, levels, rows)


def save(arguments: argparse.Namespace, levels: dict[int, list[Task]], rows: dict[Path, dict]) -> None:
    figures = {level: counted([rows[task.path] for task in tasks]) for level, tasks in levels.items()}
    machine = f"{platform.machine()}, {torch.get_num_threads()} threads"
    saved = {"torch": torch.__version__, "machine": machine, "inputs": arguments.inputs, "levels": figures}
    result_files.write(RESULTS, saved | {"problems": list(rows.values())})


if __name__ == "__main__":
    main()
