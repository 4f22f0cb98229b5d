"""`kernel-builder emulate` runs a project's tests on the CPU, and the emulator needs g++ alone."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kernel_builder.config.project_files import read_project
from kernel_builder.develop.emulate import default_directory
from kernel_builder.pipeline import exclusive
from kernel_builder.progress import Progress
from kernel_format.cache_directory import default_cache
from tests.support.cli import invoke
from tests.support.files import replace
from tests.support.places import ROOT

Emulate = Callable[..., tuple[int, str]]
# Kernel -> its tests that take a few seconds: forward, backward, sums over rows, all dtypes, rows of odd lengths.
KERNELS = {
    "adaln": "((test_forward or test_backward) and ([17- or [1000-)) or (test_sums and (layer-17- or rms-1000-))",
    "geglu": "test_strides or test_not_finite or test_subnormal or (test_accuracy and [shape3-)",
    "rmsnorm": "((test_norm or test_norm_of_sum) and ([shape1- or [shape4-)) or test_results_are_equal_to_the_bit",
    "rope3d": "(test_heads and [5-1-80-) or (test_grid and [False-10-) or (test_layouts and [0-token-False-10-)",
}


@pytest.fixture
def emulated(capfd: pytest.CaptureFixture[str]) -> Emulate:
    """Return a function that runs the command in this process, which has imported Torch: its status and output."""

    def run(project: Path, *arguments: str) -> tuple[int, str]:
        done = invoke("emulate", project, *arguments)
        return done.exit_code, done.output + "".join(capfd.readouterr())

    return run


@pytest.mark.parametrize(
    ("kernel", "warp_size"),
    [
        pytest.param("adaln", "64", marks=pytest.mark.nightly),  # 18 s of CPU time
        pytest.param("geglu", "32", marks=pytest.mark.nightly),  # the new project below has warps of 32 threads, too
        ("rmsnorm", "64"),
        pytest.param("rope3d", "64", marks=pytest.mark.nightly),  # 26 s of CPU time
    ],
)
def test_kernels_pass_their_tests(emulated: Emulate, kernel: str, warp_size: str) -> None:
    tests = ["-v", "-k", KERNELS[kernel]]
    status, output = emulated(ROOT / "kernels" / kernel, "--warp-size", warp_size, "--", *tests)
    assert status == 0 and " passed" in output, output
    assert all(f"::{name}[" in output for name in re.findall(r"test_\w+", KERNELS[kernel])), output


def test_a_new_project_passes_its_tests_until_it_has_a_fault(emulated: Emulate, tmp_path: Path) -> None:
    project, tests = tmp_path / "relu", ["--", "-q", "-k", "test_forward"]
    assert invoke("init", project, "--name", "org/relu", "--backends", "cuda").exit_code == 0
    status, output = emulated(project, *tests)
    assert status == 0, output
    replace(project / "relu_cuda" / "relu.cu", "  grid_wait();", "  if (threadIdx.x % 2 == 0) __syncthreads();")
    status, output = emulated(project, *tests)
    fault = "RuntimeError: kernel, block (0, 0, 0), thread (0, 0, 0): waits at __syncthreads (relu_cuda/relu.cu:"
    assert status == 1 and fault in output, output


def test_projects_without_kernels_to_emulate_are_refused(emulated: Emulate, tmp_path: Path) -> None:
    project = tmp_path / "relu"
    assert invoke("init", project, "--name", "org/relu", "--backends", "cpu").exit_code == 0
    for arguments, message in (
        ((project,), "the project has no kernel for cuda or rocm to emulate"),
        ((ROOT / "kernels/geglu", "--backend", "cuda", "--warp-size", "64"), "a warp of CUDA has 32 threads"),
    ):
        status, output = emulated(*arguments)
        assert (status, message in output) == (2, True), output


def test_another_run_for_the_same_project_is_awaited(tmp_path: Path) -> None:
    assert invoke("init", tmp_path / "relu", "--name", "org/relu", "--backends", "cpu").exit_code == 0
    target = default_directory(read_project(tmp_path / "relu"), None, 32, default_cache())
    command = [sys.executable, "-m", "kernel_builder", "emulate", tmp_path / "relu"]
    with exclusive(target, default_cache(), Progress()):
        other = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert other.stderr and other.stderr.readline() == f"another build of {target} is running; waiting for it\n"
        other.terminate()


@pytest.mark.attack
def test_no_device_of_a_project_is_copied(emulated: Emulate, tmp_path: Path) -> None:
    assert invoke("init", tmp_path / "relu", "--name", "o/relu").exit_code == 0
    (tmp_path / "relu/zero").symlink_to("/dev/zero")
    assert "is not a file: a pipe, a socket, a device" in emulated(tmp_path / "relu")[1]


def test_the_program_of_the_readme(tmp_path: Path) -> None:
    readme = (ROOT / "packages/kernel-emulator/README.md").read_text()
    source, script = (match[1] for match in re.finditer(r"```(?:cpp|sh)\n(.*?)```", readme, re.DOTALL))
    (tmp_path / "sum.cu").write_text(source)
    commands = script.replace("python ", f"{sys.executable} ")
    done = subprocess.run(["sh", "-e", "-c", commands], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert done.stdout == "1000\n"
