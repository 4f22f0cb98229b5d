"""Recognize the format of a task by its files."""

from __future__ import annotations

from pathlib import Path

from kernel_format.errors import ConfigError
from kernel_tasks import kernelbench
from kernel_tasks.task import Task

# Module of a format -> its name, and what its tasks consist of.
_FORMATS = {
    kernelbench: ("KernelBench", "a Python file with Model, get_inputs and get_init_inputs, or a directory with one"),
}


def read_task(path: Path) -> Task:
    """Read a task in any of the public formats.

    Raises:
        ConfigError: If no format has such files, or a file is not what its format requires.
    """
    for module in _FORMATS:
        if module.recognizes(path):
            return module.read(path)
    listed = "; ".join(f"{name}: {files}" for name, files in _FORMATS.values())
    state = "is in none of the task formats" if path.exists() else "does not exist"
    raise ConfigError(f"{state}; expected one of: {listed}", where=str(path), hint="docs/judge.md describes them")
