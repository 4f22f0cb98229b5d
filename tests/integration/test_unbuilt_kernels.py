"""The tests of `kernels/` can be collected while only some of the kernels are built, or none."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.places import ROOT


def test_tests_of_unbuilt_kernels_name_the_command_that_builds_them(tmp_path: Path) -> None:
    projects = [path.parent for path in ROOT.glob("kernels/*/build.toml")]
    for project in projects:
        shutil.copytree(project / "tests", tmp_path / project.name / "tests", ignore=shutil.ignore_patterns("*.pyc"))
    tests = [tmp_path / project.name / "tests" for project in projects]
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", *tests]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 5, done.stdout  # no tests collected: a release that tests nothing must not pass
    for project in projects:
        if project.name != "blocks":  # its reason names the kernels that it depends on
            assert f"not built: kernel-builder build {tmp_path / project.name} --backend" in done.stdout


def test_kernels_link_to_the_files_of_the_kit_instead_of_copying_them() -> None:
    kit = {path.read_bytes() for path in (ROOT / "kernels/kit").iterdir() if path.is_file() and path.stat().st_size}
    projects = [path.parent for path in ROOT.glob("kernels/*/build.toml")]
    listed = subprocess.run(["git", "-C", ROOT, "ls-files", *projects], capture_output=True, text=True, check=True)
    files = [ROOT / name for name in listed.stdout.splitlines()]
    copies = [path for path in files if path.is_file() and not path.is_symlink() and path.read_bytes() in kit]
    assert not copies
