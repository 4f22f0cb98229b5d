"""docs/port.md: its excerpts are those of the projects, the ported project works, its tables are current."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from kernel_builder.config.project_files import read_project
from tests.support.cli import expect, invoke
from tests.support.places import CPU, PROJECTS, ROOT, SOURCES
from tests.support.torch_process import output_with_torch

PAGE = ROOT / "docs" / "port.md"


def test_the_excerpts_are_those_of_the_projects() -> None:
    excerpts = re.findall(r"<!-- (tests/\S+) -->\n```\w+\n(.*?)\n```", PAGE.read_text(), re.DOTALL)
    assert len(excerpts) == 6
    for path, text in excerpts:
        assert text in (ROOT / path).read_text(), path


def test_the_tables_are_those_of_torch() -> None:
    stated = re.search(r"Read from the headers of Torch ([\d.]+)\.", PAGE.read_text())
    assert stated
    if not torch.__version__.startswith(f"{stated[1]}."):
        pytest.skip(f"the page is of Torch {stated[1]}")
    command = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
    output_with_torch(command, ROOT / "docs" / "stable_counterparts.py", "--check")


def test_the_ported_project_computes_the_sum(tmp_path: Path) -> None:
    project = tmp_path / "after"
    shutil.copytree(PROJECTS / "port" / "after", project)
    assert invoke("build", project, "--backend", "cpu").exit_code == 0
    assert output_with_torch(SOURCES["try_the_ported_kernel"], project) == "ok"


def test_port_understands_the_project_before(tmp_path: Path) -> None:
    before, after = tmp_path / "before", read_project(PROJECTS / "port" / "after")
    shutil.copytree(PROJECTS / "port" / "before", before)
    report = json.loads(invoke("port", before / "setup.py", "--name", "me/scaled-add", "--json").stdout)
    assert [entry["text"].partition(":")[0] for entry in report["left-out"]] == ["-O3"]
    assert not report["assumed"]
    read = read_project(before)
    assert (read.name, read.license, set(read.backends)) == (after.name, after.license, set(after.backends))
    for kernel in after.kernels:
        (first,) = (ported for ported in read.kernels if ported.backend is kernel.backend)
        assert {*kernel.src, *after.framework.src} <= set(first.src)  # type: ignore[union-attr]
        assert set(kernel.cxx_flags) <= set(first.cxx_flags) and kernel.cuda_flags == first.cuda_flags[1:]


def test_the_example_is_copied_built_and_tested(tmp_path: Path) -> None:
    """examples/softmax, which the documentation names as a start for kernels of rows."""
    project = tmp_path / "my-softmax"
    for arguments in (
        ["init", "--from", str(ROOT / "examples" / "softmax"), str(project)],
        ["build", str(project), "--variant", CPU],
    ):
        expect(0, "", *arguments)
    assert not [path for path in project.rglob("*") if path.is_symlink()]
    output_with_torch("import pytest, sys; sys.exit(pytest.main(['-q', *sys.argv[1:]]))", project / "tests")
