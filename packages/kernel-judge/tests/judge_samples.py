"""Candidates of the judge's tests: each file names its task and, if it cheats, the failure that it must be given."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from kernel_judge.judge.judgement import JudgeRequest
from tests.support.places import PROJECTS

HERE = Path(__file__).parent
CHEATS = sorted((HERE / "cheats").glob("*.py"))
HONEST = sorted((HERE / "honest").glob("*.py"))
GPU_CHEATS = sorted((HERE / "gpu" / "cheats").glob("*.py"))
GPU_HONEST = sorted((HERE / "gpu" / "honest").glob("*.py"))


def note(file: Path, key: str) -> str:
    """Return the value of a line `# key: value` in a candidate's file, or nothing."""
    match = re.search(rf"^# {key}: (.*)$", file.read_text(), re.MULTILINE)
    return match[1] if match else ""


def task_of(file: Path) -> Path:
    """Return the task that a candidate claims to solve."""
    task = HERE / "tasks" / note(file, "task")
    return task if task.is_dir() else task.with_suffix(".py")


def quick(file: Path, **more: Any) -> JudgeRequest:
    """Return a request with few inputs, and the settings of the candidate's file."""
    words = [word.partition("=") for word in note(file, "options").split() if "=" in word]
    options = {name: float(value) if "." in value else int(value) for name, _, value in words}
    settings: dict[str, Any] = {"inputs": 12, "rounds": 0, "peers": ("eager",), "device": "cpu"}
    task = more.pop("task", None) or task_of(file)
    return JudgeRequest(file, task, **(settings | options | more))


def scale_project(directory: Path, statement: str = "") -> Path:
    """Return a copy of the kernel project `stable-scale` with a `candidate.py`, and another kernel if one is given."""
    project = directory / "stable-scale"
    shutil.copytree(PROJECTS / "stable-scale", project, ignore=shutil.ignore_patterns("build"))
    shutil.copy(HERE / "honest" / "project" / "candidate.py", project)
    if statement:
        source = project / "scale" / "scale_cpu.cpp"
        source.write_text(source.read_text().replace("out[i] = factor * in[i]", statement))
    return project
