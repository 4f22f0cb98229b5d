"""Candidates of the judge's tests: the task that each claims to solve, its code and, if it cheats, its rejection."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kernel_builder import toml_file
from kernel_judge.judge.judgement import JudgeRequest
from tests.support.files import replace
from tests.support.places import PROJECTS

HERE = Path(__file__).parent
CPU = "cpu"
SMALL_TASKS = toml_file.read(HERE / "small_tasks.toml")
STATES, TASKS = SMALL_TASKS["state"], SMALL_TASKS["task"]
TASK = SMALL_TASKS["template"]
PROJECT_CANDIDATE = SMALL_TASKS["project_candidate"]


class Sample(NamedTuple):
    """A candidate.

    Attributes:
        forward: The statements of its forward.
        head: Statements of its module.
        state: The statements of its constructor; None for those of STATES.
        settings: Options of its judgement.
        device: The only device on which it has an effect.
        together: It needs no process of its own: `test_outside_inputs.py` judges it.
    """

    task: str
    forward: str
    rejected_as: str = ""
    head: str = ""
    state: str | None = None
    settings: Mapping[str, float] = {}
    device: str = ""
    together: bool = False

    def write_task(self, directory: Path) -> Path:
        """Return the task's file or directory in `tasks`, or write the task of TASKS."""
        if self.task in TASKS:
            (directory / "task.py").write_text(TASK.format(**TASKS[self.task]))
            return directory / "task.py"
        known = HERE / "tasks" / self.task
        return known if known.is_dir() else known.with_suffix(".py")

    def write(self, directory: Path) -> Path:
        """Write the candidate's file, without a model if it has no forward."""
        state = STATES.get(self.task, "") if self.state is None else self.state
        text = f"import torch\n{textwrap.dedent(self.head)}\n"
        if self.forward:
            text += "\nclass ModelNew(torch.nn.Module):\n    def __init__(self, columns=80):\n"
            text += textwrap.indent(f"super().__init__()\n{state}\n", 8 * " ") + "\n    def forward(self, x, y=None):\n"
            text += textwrap.indent(textwrap.dedent(self.forward), 8 * " ")
        file = directory / "candidate.py"
        file.write_text(text)
        return file


def read_samples(file: str) -> tuple[dict[str, Sample], dict[str, Sample]]:
    """Return the cheats and the honest candidates of a table, by what they do."""
    table = toml_file.read(HERE / file)
    cheats, honest = ({name: Sample(**keys) for name, keys in table[kind].items()} for kind in ("cheat", "honest"))
    return cheats, honest


# Cheats and honest candidates: for any device, and for GPUs.
CHEATS, HONEST = read_samples("cpu_samples.toml")
GPU_CHEATS, GPU_HONEST = read_samples("gpu_samples.toml")


def quick(sample: Sample, directory: Path, **more: Any) -> JudgeRequest:
    """Write a candidate and return a request with few inputs, and with the candidate's own settings."""
    settings: dict[str, Any] = {"inputs": 12, "rounds": 0, "peers": ("eager",), "device": "cpu"}
    return JudgeRequest(
        sample.write(directory), sample.write_task(directory), **(settings | {**sample.settings} | more)
    )


def scale_project(directory: Path, statement: str = "") -> Path:
    """Return a copy of the kernel project `stable-scale` with a `candidate.py`, and another kernel if one is given."""
    project = directory / "stable-scale"
    shutil.copytree(PROJECTS / "stable-scale", project, ignore=shutil.ignore_patterns("build"))
    (project / "candidate.py").write_text(PROJECT_CANDIDATE)
    if statement:
        replace(project / "scale" / "scale_cpu.cpp", "out[i] = factor * in[i]", statement)
    return project
