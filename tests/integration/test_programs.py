"""No program that runs outside of a sandbox is one of the current directory, or takes its settings from there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kernel_builder.checkouts import git_output
from kernel_builder.steps import crates
from kernel_builder.toolchain.index import configured_url
from kernel_builder.version import first_line
from kernel_judge.search.limited_process import guard
from kernel_judge.search.local_judge import LocalJudge, judging_devices
from tests.support.files import write_files, write_program

pytestmark = pytest.mark.attack

MODULES = ("pip", "kernel_builder", "kernel_judge", "runpy")
# rustup's rustc runs the toolchain that a file in the current directory or above it names.
PROXY = 'while [ "$PWD" != / ]; do [ ! -x evil ] || exec ./evil; cd ..; done'


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory is a hostile project below `tmp_path`; its programs and modules create this file."""
    file, project, tools = tmp_path / "ran", tmp_path / "project", tmp_path / "tools"
    modules = [f"{name}/{module}.py" for name in MODULES for module in ("__init__", "__main__")]
    write_files(project, dict.fromkeys(modules, f"open({str(file)!r}, 'a').write(__file__)\n"))
    for name in ("evil", "git", "nvidia-smi"):
        write_program(project / name, f"echo $0 >> {file}")
    write_program(tools / "rustc", PROXY)
    for variable in ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", f".::{tools}:{os.environ['PATH']}")
    monkeypatch.chdir(project / "kernel_builder/..")
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    return file


def judge() -> None:
    judge = LocalJudge(Path("task.py"), seconds=60)
    assert "Usage" in subprocess.run([*judge._command, "--help"], stdout=subprocess.PIPE, text=True, check=True).stdout


@pytest.mark.parametrize(
    "start",
    [
        configured_url,
        crates.toolchain.__wrapped__,
        judge,
        lambda: subprocess.run([*guard(), "true"], check=True),
        judging_devices,
        lambda: first_line("git", "--version"),
        lambda: git_output(Path(), "--version"),
    ],
    ids=["pip", "rustc", "judge", "guard", "nvidia-smi", "git", "checkout"],
)
def test_nothing_of_the_current_directory_runs(ran: Path, start: Callable[[], object]) -> None:
    start()
    assert not ran.exists(), ran.read_text()
