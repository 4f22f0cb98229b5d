"""The code that kernels share: the error of CUDA packages for tensors on the CPU, and the lookup in launch tables."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kernel_builder.toolchain import Toolchains
from tests.support.files import write_files
from tests.support.places import ROOT, SOURCES
from tests.support.torch_process import run_with_torch

REFUSAL = (
    "NotImplementedError: this package is for CUDA, and the tensors are on the CPU: move them to the GPU, or load the "
    'package for the CPU with get_kernel(..., backend="cpu")'
)


def test_a_package_for_cuda_names_the_other_package(tmp_path: Path) -> None:
    """The client loads it wherever Torch was built for CUDA, also on a machine without a GPU."""
    devices = (ROOT / "kernels/kit/devices.py").read_text()
    files = {"_ops.py": SOURCES["ops_for_cuda"], "__init__.py": SOURCES["package_for_cuda"]}
    write_files(tmp_path / "demo", {"devices.py": devices, **files})
    done = run_with_torch("import sys; sys.path.insert(0, sys.argv[1]); import demo", tmp_path)
    assert REFUSAL in done.stderr, done.stderr


@pytest.mark.parametrize("kernel", ["rmsnorm", "rope3d", "geglu", "decode", "adaln"])
def test_every_op_of_the_kernels_refuses(kernel: str) -> None:
    """The ops with a fake are those that are compiled."""
    python = "".join(path.read_text() for path in (ROOT / f"kernels/{kernel}/torch-ext/{kernel}").glob("*.py"))
    binding = (ROOT / f"kernels/{kernel}/torch-ext/torch_binding.cpp").read_text()
    compiled = [line.split('"')[1] for line in binding.splitlines() if line.strip().startswith("ops.impl(")]
    refusing = python.partition("\nrefuse_cpu(")[2].partition(")")[0]
    assert compiled and [name for name in compiled if f'"{name}"' not in refusing] == []


def test_the_first_row_that_serves_a_call_is_found(tmp_path: Path) -> None:
    """By `kernels/kit/launch_table.h`, which g++ compiles."""
    source = tmp_path / "table.cpp"
    source.write_text(SOURCES["launch_table"])
    options = ["-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Wpedantic", "-Werror", f"-I{ROOT / 'kernels'}"]
    subprocess.run([Toolchains().host().path, *options, source], check=True)
