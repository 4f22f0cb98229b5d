"""The kit, and the copies of it that projects carry."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

KERNELS = Path(__file__).resolve().parents[1] / "kernels"


def copy(kernels: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(kernels / "kit" / "copy.py"), *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def test_every_copy_equals_the_kit() -> None:
    assert list(KERNELS.glob("*/kit/*"))
    result = copy(KERNELS, "--check")
    assert (result.returncode, result.stdout) == (0, "")


def test_copies_follow_the_kit(tmp_path: Path) -> None:
    shutil.copytree(KERNELS / "kit", tmp_path / "kit")
    project = tmp_path / "project"
    (project / "kit").mkdir(parents=True)
    (project / "build.toml").write_text('src = ["kit/cpu.h", "kit/rows.h"]\n')
    (project / "kit" / "rows.h").write_text("changed\n")
    (project / "kit" / "other.h").write_text("no longer listed\n")
    listed = "project/kit/cpu.h\nproject/kit/other.h\nproject/kit/rows.h\n"
    assert (copy(tmp_path, "--check").returncode, copy(tmp_path, "--check").stdout) == (1, listed)
    assert copy(tmp_path).returncode == 0
    assert sorted(path.name for path in (project / "kit").iterdir()) == ["cpu.h", "rows.h"]
    assert (project / "kit" / "rows.h").read_bytes() == (KERNELS / "kit" / "rows.h").read_bytes()
    assert copy(tmp_path, "--check").returncode == 0
