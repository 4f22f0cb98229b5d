"""examples/softmax, which the documentation names as a start for kernels of rows, can be copied, built and tested."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from kernel_builder.cli import main
from tests.support.places import CPU, ROOT
from tests.support.torch_process import run_with_torch


def test_the_example_is_copied_built_and_tested(tmp_path: Path) -> None:
    project = tmp_path / "my-softmax"
    for arguments in (
        ["init", "--from", str(ROOT / "examples" / "softmax"), str(project)],
        ["build", str(project), "--variant", CPU],
    ):
        done = CliRunner().invoke(main, arguments)
        assert done.exit_code == 0, done.output
    assert not [path for path in project.rglob("*") if path.is_symlink()]
    tested = run_with_torch("import pytest, sys; sys.exit(pytest.main(['-q', *sys.argv[1:]]))", project / "tests")
    assert tested.returncode == 0, tested.stdout
