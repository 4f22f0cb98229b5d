"""The naive kernels of `kernels/`: short, and accepted by the builder. `make device-code` compiles them."""

from __future__ import annotations

from click.testing import CliRunner

from kernel_builder.cli import main
from tests.support.places import ROOT

PROJECTS = sorted(path.parent for path in ROOT.glob("kernels/*/naive/build.toml"))
MOST_LINES = 120  # with the binding


def test_every_kernel_has_one_in_one_short_file() -> None:
    """`kernel-builder benchmark` compares them with float64 at every shape that is measured."""
    # The kernel of `loss` is one step between products of matrices; its problem.h has the formula.
    kernels = {path.parent for path in ROOT.glob("kernels/*/*_cuda")} - {ROOT / "kernels" / "loss"}
    assert {project.parent for project in PROJECTS} == kernels
    for project in PROJECTS:
        (source,) = project.glob("*.cu")
        assert source.stem == project.parent.name
        assert len(source.read_text().splitlines()) <= MOST_LINES
    done = CliRunner().invoke(main, ["check-config", *map(str, PROJECTS)])
    assert done.exit_code == 0, done.output
