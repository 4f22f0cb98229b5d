"""The emulator runs device code with g++ alone, as the README of its distribution shows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.support.places import ROOT


def test_the_program_of_the_readme(tmp_path: Path) -> None:
    readme = (ROOT / "packages/kernel-emulator/README.md").read_text()
    source, script = (match[1] for match in re.finditer(r"```(?:cpp|sh)\n(.*?)```", readme, re.DOTALL))
    (tmp_path / "sum.cu").write_text(source)
    commands = script.replace("python ", f"{sys.executable} ")
    done = subprocess.run(["sh", "-e", "-c", commands], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert done.stdout == "1000\n"
