"""A check that did not run has not passed, is named with its reason, and runs as soon as it can."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.integration.build_command.conftest import BUILDER, Copy, Run, environment

ABSENT = "PyTorch and the client cannot be imported: no Torch here"


def test_a_package_that_could_not_be_loaded_is_loaded_later(
    copy_project: Copy, cache: Path, kernel_builder: Run, tmp_path: Path
) -> None:
    project = copy_project("python-only")
    init = project / "torch-ext/python_only/__init__.py"
    sound = init.read_text()
    init.write_text("import os\n\nos.kill(os.getpid(), 11)\n")
    hidden = tmp_path / "hidden"
    (hidden / "torch").mkdir(parents=True)
    (hidden / "torch/__init__.py").write_text("raise ImportError('no Torch here')\n")
    without = {"PYTHONPATH": f"{hidden}:{Path(__file__).parents[3]}"}
    arguments = ("build", project, "--variant", "torch-cpu")

    done = kernel_builder(cache, *arguments, **without)
    (built,) = done.answer["packages"]
    assert (done.code, built["status"], built["skipped-checks"]["load"]) == (0, "built", ABSENT)
    assert "load" not in built["passed-checks"]
    again = subprocess.run(
        [BUILDER, *arguments], env=environment(cache, **without), capture_output=True, text=True, check=True
    )
    _, row, why, last = again.stdout.splitlines()
    assert "unchanged" in row and row.endswith("5 passed, load skipped")
    assert why == f"not loaded here: torch-cpu: {ABSENT}"
    assert last.startswith("1 variant from 0 binaries; 0 files compiled")

    done = kernel_builder(cache, *arguments)
    assert (done.code, done.answer["error"]) == (7, "CheckError")
    assert "the process was killed by SIGSEGV" in done.answer["message"]

    init.write_text(sound)
    done = kernel_builder(cache, *arguments, "--no-load")
    assert done.answer["packages"][0]["skipped-checks"]["load"] == "--no-load"
    done = kernel_builder(cache, *arguments)
    assert "load" in done.answer["packages"][0]["passed-checks"]
    assert kernel_builder(cache, *arguments).answer["packages"][0]["status"] == "unchanged"
