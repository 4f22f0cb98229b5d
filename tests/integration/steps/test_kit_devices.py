"""The error of a CUDA package's ops for tensors on the CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.places import ROOT

OPS = """
import torch


def add_op_namespace_prefix(name):
    return f"_demo_{BACKEND}_1::{name}"


torch.library.define(add_op_namespace_prefix("scaled"), "(Tensor x) -> Tensor")
"""
INIT = """
import torch

from .devices import refuse_cpu

refuse_cpu("scaled")
try:
    torch.ops._demo_BACKEND_1.scaled(torch.ones(1))
except NotImplementedError as error:
    print(str(error).splitlines()[0])
"""


def test_a_package_for_cuda_names_the_other_package(tmp_path: Path) -> None:
    """The client loads it wherever Torch was built for CUDA, also on a machine without a GPU."""
    for backend in ("cuda", "cpu"):
        package = tmp_path / f"demo_{backend}"
        package.mkdir()
        (package / "devices.py").write_text((ROOT / "kernels/kit/devices.py").read_text())
        (package / "_ops.py").write_text(OPS.replace("{BACKEND}", backend))
        (package / "__init__.py").write_text(INIT.replace("BACKEND", backend))
    command = [sys.executable, "-c", "import demo_cuda, demo_cpu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    for_cuda, for_cpu = done.stdout.splitlines()
    assert for_cuda == (
        "this package is for CUDA, and the tensors are on the CPU: move them to the GPU, or load the package for the "
        'CPU with get_kernel(..., backend="cpu")'
    )
    assert for_cpu.startswith("Could not run '_demo_cpu_1::scaled' with arguments from the 'CPU' backend")


@pytest.mark.parametrize("kernel", ["rmsnorm", "rope3d", "geglu", "decode", "adaln"])
def test_every_op_of_the_kernels_refuses(kernel: str) -> None:
    """The ops with a fake are those that are compiled."""
    python = "".join(path.read_text() for path in (ROOT / f"kernels/{kernel}/torch-ext/{kernel}").glob("*.py"))
    binding = (ROOT / f"kernels/{kernel}/torch-ext/torch_binding.cpp").read_text()
    compiled = [line.split('"')[1] for line in binding.splitlines() if line.strip().startswith("ops.impl(")]
    refusing = python.partition("\nrefuse_cpu(")[2].partition(")")[0]
    assert compiled and [name for name in compiled if f'"{name}"' not in refusing] == []
