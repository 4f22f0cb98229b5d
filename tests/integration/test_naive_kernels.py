"""The naive kernels of `kernels/`: short, compiled by the builder, and right at every shape that is measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from kernel_builder.cli import main
from tests.support.places import CUDA, ROOT

PROJECTS = sorted(path.parent for path in ROOT.glob("kernels/*/naive/build.toml"))
MOST_LINES = 80


def test_every_kernel_has_one_in_one_short_file() -> None:
    """`kernel-builder benchmark` compares them with float64 at every shape that is measured."""
    # The kernel of `loss` is one step between products of matrices; its problem.h has the formula.
    kernels = {path.parent for path in ROOT.glob("kernels/*/*_cuda")} - {ROOT / "kernels" / "loss"}
    assert {project.parent for project in PROJECTS} == kernels
    for project in PROJECTS:
        (source,) = project.glob("*.cu")
        assert source.stem == project.parent.name
        assert len(source.read_text().splitlines()) <= MOST_LINES


@pytest.mark.slow
def test_they_compile(tmp_path: Path) -> None:
    chosen = ["--variant", CUDA, "--capability", "9.0", "--no-load", "--out", str(tmp_path)]
    done = CliRunner().invoke(main, ["build", *map(str, PROJECTS), *chosen])
    assert done.exit_code == 0, done.output
    assert {path.name for path in tmp_path.iterdir()} == {f"{project.parent.name}-naive" for project in PROJECTS}
