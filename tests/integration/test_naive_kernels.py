"""The naive kernels of `kernels/`: short, compiled by the builder, and right at every shape that is measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from kernel_builder.cli import main
from kernel_builder.measure import workloads
from kernel_builder.measure.accuracy import deviation, fault
from kernel_builder.measure.case import tensors
from kernel_builder.measure.run import NAIVE
from tests.support.places import CUDA, ROOT

PROJECTS = sorted(path.parent for path in ROOT.glob("kernels/*/naive/build.toml"))
MOST_LINES = 80


def test_every_kernel_has_one() -> None:
    kernels = {path.parent for path in ROOT.glob("kernels/*/*_cuda")}
    assert {project.parent for project in PROJECTS} == kernels


@pytest.mark.parametrize("project", PROJECTS, ids=lambda path: path.parent.name)
def test_it_is_one_short_file(project: Path) -> None:
    (source,) = project.glob("*.cu")
    assert source.stem == project.parent.name
    assert len(source.read_text().splitlines()) <= MOST_LINES


@pytest.mark.slow
def test_they_compile(tmp_path: Path) -> None:
    chosen = ["--variant", CUDA, "--capability", "9.0", "--no-load", "--out", str(tmp_path)]
    done = CliRunner().invoke(main, ["build", *map(str, PROJECTS), *chosen])
    assert done.exit_code == 0, done.output
    assert {path.name for path in tmp_path.iterdir()} == {f"{project.parent.name}-naive" for project in PROJECTS}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("project", PROJECTS, ids=lambda path: path.parent.name)
def test_it_is_right_at_every_shape_that_is_measured(project: Path) -> None:
    from kernels import get_local_kernel

    kernel = get_local_kernel(project, backend="cuda")
    declared = [workload for workload in workloads.load(project.parent).values() if hasattr(workload, NAIVE)]
    assert declared
    for workload in declared:
        for shape in workload.shapes["forward"]["cuda"]:
            instance = workloads.make(workload, None, "cuda", "bfloat16")
            instance.naive_kernel = kernel
            inputs = instance.inputs(*shape)
            exact = tensors(instance.eager(*(tensor.double() for tensor in inputs)))
            naive, eager = (
                [deviation(*pair) for pair in zip(tensors(function(*inputs)), exact, strict=True)]
                for function in (instance.naive, instance.eager)
            )
            assert fault(naive, eager, 1.1) is None, (workload.title, shape)
