"""Loading packages with the public client, in processes that may die."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernel_builder.checks import CheckReport, run
from kernel_builder.config.variant import FullAbi, Release, this_platform

from .sample import INIT, STABLE_CPU, STABLE_CUDA, Compile, assemble

FULL_ABI = f"{FullAbi(Release.parse(torch.__version__.partition('+')[0]))}-cpu-{this_platform()}"
CRASHING = f"torch-stable-abi211-cpu-{this_platform()}"
RAISING = f"torch-stable-abi212-cpu-{this_platform()}"
NOT_YET = f"torch-stable-abi299-cpu-{this_platform()}"
ELSEWHERE = f"torch-stable-abi210-cpu-{'aarch64' if this_platform().startswith('x86') else 'x86_64'}-linux"


@pytest.fixture(scope="module")
def build(compile_module: Compile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return packages of a project: a valid one, a Python-only one, and some that do not load."""
    build = tmp_path_factory.mktemp("project") / "build"
    sound = compile_module(STABLE_CPU)
    crash = "__attribute__((constructor)) static void crash() { __builtin_trap(); }"
    undefined = 'namespace demo { void launch(); }\n__attribute__((visibility("default"))) void f() { demo::launch(); }'
    assemble(build, STABLE_CPU, sound)
    assemble(build, "torch-cpu", None)
    assemble(build, CRASHING, compile_module(STABLE_CPU, crash))
    assemble(build, RAISING, sound, {"__init__.py": INIT + "raise RuntimeError('not today')\n"})
    assemble(build, FULL_ABI, compile_module(STABLE_CPU, undefined))
    assemble(build, STABLE_CUDA, compile_module(STABLE_CUDA))
    assemble(build, NOT_YET, sound)
    assemble(build, ELSEWHERE, sound)
    return build


def load(package: Path) -> CheckReport:
    return run(package, only=["load"])


@pytest.mark.parametrize("variant", [STABLE_CPU, "torch-cpu"])
def test_a_valid_package_loads_and_is_not_changed(build: Path, variant: str) -> None:
    before = sorted((build / variant).rglob("*"))
    assert load(build / variant).passed == ("load",)
    assert sorted((build / variant).rglob("*")) == before


@pytest.mark.parametrize(
    ("variant", "message", "hint"),
    [
        (CRASHING, "the process was killed by SIG", "static initialisers"),
        (RAISING, "RuntimeError: not today", "full traceback"),
        (FULL_ABI, "undefined symbol: _ZN4demo6launchEv", "`src` in build.toml"),
    ],
)
def test_a_package_that_does_not_load(build: Path, variant: str, message: str, hint: str) -> None:
    (finding,) = load(build / variant).findings
    assert (finding.check, finding.path) == ("load", "__init__.py")
    assert message in finding.message
    assert hint in finding.hint


@pytest.mark.parametrize(
    ("variant", "reason"),
    [
        (STABLE_CUDA, "backend (cu130) does not match selected backend (cpu)"),
        (NOT_YET, "Torch stable ABI version (2.99) is too new"),
        (ELSEWHERE, "this machine is"),
    ],
)
def test_a_variant_that_the_client_would_reject_is_skipped(build: Path, variant: str, reason: str) -> None:
    if variant == STABLE_CUDA and torch.version.cuda is not None:
        pytest.skip("this Torch may load a CUDA variant")
    report = load(build / variant)
    assert report.findings == ()
    assert reason in report.skipped["load"]
