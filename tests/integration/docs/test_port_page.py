"""docs/port.md: its excerpts are those of the projects, all three versions compute the same, its tables are current."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernel_builder.config.project_files import read_project
from kernel_builder.config.variant import this_platform
from tests.support.places import PROJECTS, ROOT
from tests.support.torch_process import run_with_torch

PAGE = ROOT / "docs" / "port.md"
TRY = """
import json, sys, torch
a, b = torch.arange(6.0).reshape(2, 3), torch.ones(3, 2).t()
assert not b.is_contiguous()
results = [scaled_add(a, b, 0.5), scaled_add(a.double(), b.double()), scaled_add(a[:0], b[:0])]
try:
    scaled_add(a, a[:1])
except RuntimeError:
    print(json.dumps([[str(one.dtype), one.tolist()] for one in results]))
"""


def test_the_excerpts_are_those_of_the_projects() -> None:
    excerpts = re.findall(r"<!-- (tests/\S+) -->\n```\w+\n(.*?)\n```", PAGE.read_text(), re.DOTALL)
    assert len(excerpts) >= 7
    for path, text in excerpts:
        assert text in (ROOT / path).read_text(), path


def test_the_tables_are_those_of_torch() -> None:
    stated = re.search(r"Read from the headers of Torch ([\d.]+)\.", PAGE.read_text())
    assert stated
    if not torch.__version__.startswith(f"{stated[1]}."):
        pytest.skip(f"the page is of Torch {stated[1]}")
    command = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
    done = run_with_torch(command, ROOT / "docs" / "stable_counterparts.py", "--check")
    assert done.returncode == 0, done.stderr


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def tried(load: str, project: Path) -> str:
    done = run_with_torch(load + TRY, project)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The results of the project before, built by torch.utils.cpp_extension."""
    before = tmp_path_factory.mktemp("port") / "before"
    shutil.copytree(PROJECTS / "port" / "before", before)
    quick = {"CFLAGS": "-O0 -g0", "MAX_JOBS": "2", "CUDA_VISIBLE_DEVICES": ""}
    # Else Torch puts the system's sccache before the compiler, which fails where a server of another release runs.
    quick["TORCH_NO_COMPILER_WRAPPER"] = "1"
    run(sys.executable, "setup.py", "--quiet", "build_ext", "--inplace", cwd=before, **quick)
    results = tried("import sys; sys.path.insert(0, sys.argv[1]); from scaled_add import scaled_add", before)
    assert json.loads(results)[0] == ["torch.float32", [[0.5, 1.5, 2.5], [3.5, 4.5, 5.5]]]
    return results


@pytest.mark.parametrize("version", ["full-abi", "stable-abi"])
def test_it_computes_the_same_afterwards(version: str, expected: str, tmp_path: Path) -> None:
    project = tmp_path / version
    shutil.copytree(PROJECTS / "port" / version, project)
    abi = "stable-abi210" if version == "stable-abi" else "{}{}-cxx11".format(*torch.__version__.split(".")[:2])
    variant = f"torch-{abi}-cpu-{this_platform()}" if version == "stable-abi" else f"torch{abi}-cpu-{this_platform()}"
    run(sys.executable, "-m", "kernel_builder", "build", project, "--variant", variant, cwd=ROOT)
    load = "import sys; from pathlib import Path; from kernels import get_local_kernel\n"
    load += "scaled_add = get_local_kernel(Path(sys.argv[1]), backend='cpu').scaled_add"
    assert tried(load, project) == expected


def test_port_understands_the_project_before(tmp_path: Path) -> None:
    before, after = tmp_path / "before", read_project(PROJECTS / "port" / "full-abi")
    shutil.copytree(PROJECTS / "port" / "before", before)
    command = ("-m", "kernel_builder", "port", before / "setup.py", "--name", "me/scaled-add", "--json")
    report = json.loads(run(sys.executable, *command, cwd=ROOT))
    assert [entry["text"].partition(":")[0] for entry in report["left-out"]] == ["-O3"]
    assert not report["assumed"]
    read = read_project(before)
    assert (read.name, read.license, set(read.backends)) == (after.name, after.license, set(after.backends))
    for kernel in after.kernels:
        (first,) = (ported for ported in read.kernels if ported.backend is kernel.backend)
        assert {*kernel.src, *after.framework.src} <= set(first.src)  # type: ignore[union-attr]
        assert set(kernel.cxx_flags) <= set(first.cxx_flags) and kernel.cuda_flags == first.cuda_flags[1:]
