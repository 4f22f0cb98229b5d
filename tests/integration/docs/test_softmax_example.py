"""examples/softmax, which the documentation names as a start for kernels of rows, can be copied, built and tested."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner

from kernel_builder.cli import main
from tests.support.places import CPU, ROOT


def test_the_example_is_copied_built_and_tested(tmp_path: Path) -> None:
    project = tmp_path / "my-softmax"
    for arguments in (
        ["init", "--from", str(ROOT / "examples" / "softmax"), str(project)],
        ["build", str(project), "--variant", CPU],
    ):
        done = CliRunner().invoke(main, arguments)
        assert done.exit_code == 0, done.output
    assert not [path for path in project.rglob("*") if path.is_symlink()]
    subprocess.run([sys.executable, "-m", "pytest", "-q", str(project / "tests")], check=True)
