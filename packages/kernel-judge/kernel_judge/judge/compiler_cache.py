"""Files that `torch.compile` needs once for a CPU: probes of instructions, precompiled Torch headers.

A worker has an empty home, and would need 15 s to make them. All workers read them from one directory. Only a worker
that runs the judge's own model adds to it, never one that runs a candidate or a task.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from kernel_format import files
from kernel_judge.judge.peer_workers import COMPILE
from kernel_judge.judge.reference import Reference
from kernel_judge.judge.result_checks import place
from kernel_judge.judge.task import read_task
from kernel_judge.judge.verdict import Notify
from kernel_judge.judge.worker_process import WorkerFailure, WorkerProcess

_PROBLEM = """
import torch


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) + 1


def get_inputs():
    return [torch.ones(64)]


def get_init_inputs():
    return []
"""
_SECONDS = 180.0
# Locks, and files of this model alone.
_OF_THE_MODEL = ("*.lock", "locks", "*.py", "fxgraph", "aotautograd")


def existing(root: Path) -> Path | None:
    """Return the directory for this installation of Torch in the builder's cache, or None."""
    directory = _directory(root)
    return directory if directory.is_dir() else None


def prepared(root: Path, make: Callable[[], WorkerProcess], notify: Notify) -> Path | None:
    """Return the directory for this installation of Torch, which is made if it is not there; None if nothing compiles.

    Args:
        root: The builder's cache.
        make: Starts a worker for the CPU.
        notify: Called with a message if the directory is created, or cannot be.
    """
    directory = _directory(root)
    try:
        return directory if directory.is_dir() or _made(directory, make, notify) else None
    except OSError as error:
        notify(f"torch.compile needs more time, since {error.filename} cannot be written: {error.strerror}")
        return None


def _directory(root: Path) -> Path:
    # A precompiled header serves one installation of Torch: Torch names it by a digest of the paths to its headers too.
    digest = hashlib.sha256(torch.__file__.encode()).hexdigest()
    return root / "torch-compile" / f"{torch.__version__}-{digest[:12]}"


def _made(directory: Path, make: Callable[[], WorkerProcess], notify: Notify) -> bool:
    directory.parent.mkdir(parents=True, exist_ok=True)
    with (
        files.locked(Path(f"{directory}.lock"), waiting=lambda: notify("waiting for another judge")),
        tempfile.TemporaryDirectory(prefix="new-", dir=directory.parent) as staging,
    ):
        if directory.is_dir():
            return True
        notify("preparing torch.compile, once on this machine")
        problem = Path(staging, "problem.py")
        problem.write_text(_PROBLEM, encoding="utf-8")
        reference = Reference(read_task(problem), {}, None, "cpu", 0)
        with make() as worker:
            try:
                worker.ready(_SECONDS)
                source = worker.scratch / problem.name
                source.write_text(_PROBLEM, encoding="utf-8")
                worker.ask("load", str(source), "Model", seconds=_SECONDS)
                worker.ask("model", 0, *reference.model_arguments(COMPILE), seconds=_SECONDS)
                calls, slots = place(worker, reference, [reference.arguments(reference.seed)])
                worker.ask("call", 0, calls[0], slots[0], reference.seed, None, seconds=_SECONDS)
            except WorkerFailure as failure:
                notify(f"torch.compile cannot be prepared: {failure}")
                return False
            shutil.copytree(worker.compiled, f"{staging}/made", ignore=shutil.ignore_patterns(*_OF_THE_MODEL))
        Path(staging, "made").rename(directory)
    return True
