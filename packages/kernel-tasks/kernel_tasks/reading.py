"""Recognize the format of a task by its files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from kernel_format.errors import ConfigError
from kernel_tasks import backend_bench, flashinfer_bench, gpu_mode, kernelbench, sol_execbench
from kernel_tasks.task import Task


class _Format(NamedTuple):
    name: str
    files: str  # of a task
    recognizes: Callable[[Path], bool]
    read: Callable[[Path], Task]


_FORMATS = (
    _Format("GPU MODE", "a directory with task.yml", gpu_mode.recognizes, gpu_mode.read),
    _Format(
        "SOL-ExecBench",
        "a directory with definition.json and workload.jsonl",
        sol_execbench.recognizes,
        sol_execbench.read,
    ),
    _Format(
        "FlashInfer-Bench",
        "a definition (JSON) with workloads/NAME.jsonl in its directory or one above",
        flashinfer_bench.recognizes,
        flashinfer_bench.read,
    ),
    _Format(
        "BackendBench",
        "a trace (.txt) or a table (.parquet) of operators, FILE::OPERATOR if it has several",
        backend_bench.recognizes,
        backend_bench.read,
    ),
    _Format(
        "KernelBench",
        "a Python file with Model, get_inputs and get_init_inputs, or a directory with one",
        kernelbench.recognizes,
        kernelbench.read,
    ),
)


def read_task(path: Path) -> Task:
    """Read a task in any of the public formats.

    Raises:
        ConfigError: If no format has such files, or a file is not what its format requires.
    """
    for known in _FORMATS:
        if known.recognizes(path):
            return known.read(path)
    listed = "; ".join(f"{known.name}: {known.files}" for known in _FORMATS)
    state = "is in none of the task formats" if path.exists() else "does not exist"
    raise ConfigError(f"{state}; expected one of: {listed}", where=str(path), hint="docs/judge.md describes them")
