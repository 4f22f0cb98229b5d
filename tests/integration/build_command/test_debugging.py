"""KERNEL_BUILDER_DEBUG=keep: work directories stay, so that a failed step can be run again."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.integration.build_command.conftest import RIGHT, Copy, Run, assert_refused, replace
from tests.support.places import CPU


def test_a_failed_step_can_be_run_again(copy_project: Copy, cache: Path, kernel_builder: Run) -> None:
    project = copy_project("stable-scale")
    source = project / "scale" / "scale_cpu.cpp"
    replace(source, RIGHT, "out[i] = unknown * in[i]")
    command = ("build", project, "--variant", CPU)
    done = kernel_builder(cache, *command, KERNEL_BUILDER_DEBUG="keep")
    assert_refused(done, 5, "BuildError", where=str(source), message="unknown", hint=None)
    assert (
        "no sandbox is available, so compilers and packages run without one (KERNEL_BUILDER_DEBUG=keep)" in done.stderr
    )
    (work,) = (Path(name) for name in re.findall(r"^kept: (.*/work/[\w-]+)$", done.stderr, re.M))
    (copied,) = work.glob("*/inside/src/scale/scale_cpu.cpp")
    failed = copied.parents[3]
    replace(copied, "unknown", "factor")
    subprocess.run(["sh", "../command"], check=True, cwd=failed / "inside")
    assert (failed / "inside/out.o").exists()

    kernel_builder(cache, *command, KERNEL_BUILDER_DEBUG="keep")
    assert len(list((cache / "work").iterdir())) == 2
    kernel_builder(cache, *command)
    assert not list((cache / "work").glob("*")), "a build without the variable removes them"


def test_debugging_and_a_required_sandbox_exclude_each_other(project: Path, cache: Path, kernel_builder: Run) -> None:
    command = ("build", project, "--variant", CPU, "--sandbox", "require")
    done = kernel_builder(cache, *command, KERNEL_BUILDER_DEBUG="keep")
    assert_refused(done, 4, "ToolchainError", where="--sandbox", message="runs nothing in a sandbox", hint="leave out")
