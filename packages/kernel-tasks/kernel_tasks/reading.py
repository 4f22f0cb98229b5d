"""Recognize the format of a task by its files."""

from __future__ import annotations

from pathlib import Path

from kernel_format.errors import ConfigError
from kernel_format.untrusted_paths import UnsafePath, checked_tree
from kernel_tasks import backend_bench, flashinfer_bench, gpu_mode, kernelbench, sol_execbench
from kernel_tasks.task import Task

# The first format that recognizes a path reads it.
_FORMATS = (gpu_mode, sol_execbench, flashinfer_bench, backend_bench, kernelbench)


def is_task(path: Path) -> bool:
    """Return whether a format recognizes a path."""
    return any(module.recognizes(path) for module in _FORMATS)


def read_task(path: Path) -> Task:
    """Read a task in any of the public formats.

    Raises:
        ConfigError: If no format has such files, or a file is not what its format requires.
    """
    for module in _FORMATS:
        if module.recognizes(path):
            task: Task = module.read(path)
            try:
                checked_tree(task.files)  # they are written into other directories
            except UnsafePath as error:
                raise ConfigError(str(error), where=str(path), hint="name files of the task's directory") from None
            return task
    state = "is in none of the task formats" if path.exists() else "does not exist"
    listed = "; ".join(module.FORMAT for module in _FORMATS)
    raise ConfigError(f"{state}; expected one of: {listed}", where=str(path), hint="docs/judge.md describes them")
