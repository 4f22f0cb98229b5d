"""Loading packages with the public client, in processes that may die."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kernel_builder.checks import CheckReport, ProbeProcess, run_all
from kernel_builder.checks.load import asked_for
from kernel_builder.config.variant import this_platform
from tests.support.places import SOURCES
from tests.support.sample_package import STABLE_CUDA, Compile, assemble

Load = Callable[[Path], CheckReport]

NOT_YET = f"torch-stable-abi299-cpu-{this_platform()}"
NOTHING = ("60", "{}", "{}")  # a question about no package
ELSEWHERE = f"torch-stable-abi210-cpu-{'aarch64' if this_platform().startswith('x86') else 'x86_64'}-linux"


def asking_for(*packages: Path) -> str:
    return json.dumps({str(package): asked_for(package.name) for package in packages})


@pytest.fixture
def load(probe: ProbeProcess) -> Load:
    """Return a function that checks a package in the process that imports Torch for all tests."""
    return lambda package: next(run_all([package], only=["load"], probe=probe))


@pytest.mark.parametrize(
    ("variant", "reason"),
    [
        (STABLE_CUDA, "this machine's Torch has no CUDA"),
        (NOT_YET, "Torch stable ABI version (2.99) is too new"),
        (ELSEWHERE, "this machine is"),
    ],
)
def test_a_variant_that_the_client_would_reject_is_skipped(
    load: Load, compile_module: Compile, tmp_path: Path, variant: str, reason: str
) -> None:
    if variant == STABLE_CUDA and torch.version.cuda is not None:
        pytest.skip("this Torch may load a CUDA variant")
    report = load(assemble(tmp_path, variant, compile_module(variant)))
    assert report.findings == () and reason in report.skipped["load"]


@pytest.mark.parametrize(
    "statement", ["import triton_that_is_absent", "from triton_that_is_absent.language import x", "from . import part"]
)
def test_a_module_that_this_machine_lacks_skips_the_check(load: Load, tmp_path: Path, statement: str) -> None:
    """A machine without a GPU has no Triton. The check `python-imports` knows the modules of users."""
    files = {"__init__.py": f"{statement}\n", "part.py": "import triton_that_is_absent\n"}
    report = load(assemble(tmp_path, "torch-cpu", None, files))
    assert report.findings == ()
    assert report.skipped["load"] == "this machine has no triton_that_is_absent, which the package imports"


@pytest.mark.parametrize(
    "statement", ["from .lost import x", "import demo_kernel.lost", "import importlib as i; i.import_module('gone')"]
)
def test_a_module_that_the_package_lacks_is_an_error(load: Load, tmp_path: Path, statement: str) -> None:
    (finding,) = load(assemble(tmp_path, "torch-cpu", None, {"__init__.py": f"{statement}\n"})).findings
    assert "ModuleNotFoundError" in finding.message


def loading(build: Path, variant: str, statement: str) -> Path:
    """Write a package that executes a statement when it is loaded."""
    files = {"__init__.py": f"import os, signal, sys, time\nfrom pathlib import Path\n\n{statement}\n"}
    return assemble(build, variant, None, files)


def test_one_process_imports_torch_for_all_projects_of_a_command(load: Load, tmp_path: Path) -> None:
    """Each package still has a process, a directory and an empty standard input of its own."""
    seen = "os.getppid(), os.getpid(), os.getcwd(), sys.stdin.read()"
    for name in ("one", "two"):
        statement = f"Path({str(tmp_path / f'{name}.txt')!r}).write_text(str(({seen})))"
        report = load(loading(tmp_path / name, "torch-cpu", statement))
        assert report.passed == ("load",), report
    first, second = (ast.literal_eval((tmp_path / f"{name}.txt").read_text()) for name in ("one", "two"))
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert first[2] != second[2] and not Path(first[2]).exists()
    assert first[3] == second[3] == ""


@pytest.mark.parametrize(
    ("signal_name", "seconds", "message"),
    [("SIGKILL", 120, "the process was killed by SIGKILL"), ("SIGSTOP", 1, "no answer after 1 s")],
)
def test_a_process_that_is_killed_or_hangs_is_replaced(
    probe: ProbeProcess, load: Load, tmp_path: Path, signal_name: str, seconds: float, message: str
) -> None:
    """A package can stop the process that all packages of a project share, and not that of the next project."""
    bad = loading(tmp_path / "bad", "torch-cpu", f"os.kill(os.getppid(), signal.{signal_name})")
    good = loading(tmp_path / "good", "torch-cpu", "")
    with ProbeProcess("/bin/false") as failing:
        assert failing.ask(*NOTHING)(60) == ("failed", "the process ended with status 1")
    probe.ask(*NOTHING)(60)
    assert message in str(probe.ask("60", "{}", asking_for(bad))(seconds))
    report = load(good)
    assert report.passed == ("load",), report


@pytest.mark.attack
@pytest.mark.parametrize(
    "statement",
    [
        "answer(b'{\"' + b'x' * (300 << 20) + b'\"}\\n')",
        "answer(*[b'x'] * 100, pause=0.5)",
        "Path('result.json').write_text('{\"outcome\": 1}')\nos._exit(0)",
    ],
)
def test_a_forged_answer_fails_its_own_project(
    probe: ProbeProcess, load: Load, statement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernel_builder.checks.load.SECONDS", 5)
    bad = loading(tmp_path / "bad", "torch-cpu", f"{SOURCES['forged_answers']}\n{statement}")
    good = loading(tmp_path / "good", "torch-cpu", "")
    probe.ask(*NOTHING)(60)
    (finding,) = load(bad).findings
    monkeypatch.undo()
    assert re.search("answers in another form|no answer after", finding.message) and len(finding.message) < 5000
    report = load(good)
    assert report.passed == ("load",), report


def test_a_package_that_hangs_is_given_up(probe: ProbeProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging, good = loading(tmp_path, "torch-cpu", "time.sleep(60)"), loading(tmp_path, "torch-cuda", "")
    answers = probe.ask("3", "{}", asking_for(hanging, good))(60)
    assert answers[str(hanging)] == {"outcome": "failed", "text": "no answer after 3 s"}
    assert answers[str(good)]["outcome"] in ("loaded", "skipped")
    monkeypatch.setattr("kernel_builder.checks.load.SECONDS", 1)
    (finding,) = next(run_all([hanging], only=["load"])).findings
    assert finding.message.startswith("the client cannot load the package: no answer after ")
    assert finding.hint == "look at code that runs when the package is imported: it waits, or computes for too long"


def test_a_debugger_stops_in_a_package(tmp_path: Path) -> None:
    package = loading(tmp_path, "torch-cpu", "level = 'of the package'\nbreakpoint()")
    command = [sys.executable, "-m", "kernel_builder.checks.probe", "load", str(package)]
    done = subprocess.run(command, input="p level\ncontinue\n", capture_output=True, text=True, check=True)
    assert "'of the package'" in done.stdout
    assert '"outcome": "loaded"' in done.stdout
