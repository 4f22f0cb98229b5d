"""Runs one compile step without ninja."""

from __future__ import annotations

import subprocess
from pathlib import Path

from kernel_builder.steps.graph import CompileStep
from kernel_builder.steps.step_scripts import stage_compile
from kernel_builder.toolchain import host_compiler


def compile_alone(step: CompileStep, work: Path, output: Path) -> None:
    stage_compile(step, work / step.key, output)
    done = subprocess.run(["sh", f"{step.key}/run.sh"], cwd=work, env=host_compiler.environment(), check=False)
    assert done.returncode == 0, (work / step.key / "log").read_text()
