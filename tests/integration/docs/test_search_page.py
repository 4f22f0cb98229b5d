"""The commands of docs/search.md that need no model and no GPU work as typed."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.support.places import ROOT
from tests.support.programs import run

BUILDER = shlex.quote(str(Path(sys.executable).with_name("kernel-builder")))


@pytest.mark.nightly  # two judgements and a build take 20 s of CPU time
@pytest.mark.timeout(300)
def test_the_commands_with_which_an_agent_writes_a_kernel(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "search.md").read_text().partition("examples/search")[2].partition("\n## ")[0]
    commands = re.findall(r"^    kernel-builder (.*)$", text, re.MULTILINE)
    assert len(commands) == 3
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    printed = []
    # Other tests run at the same time: threads would wait for each other, and the kernel would not be the faster one.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for command in commands:
        printed.append(run("sh", "-c", f"{BUILDER} {command} 2>&1", cwd=tmp_path, env=environment))
    assert "attempt 1, try 1 (examples/search/scripted_agent.py): wrong: " in printed[0]
    assert "attempt 1, try 2 (examples/search/scripted_agent.py): right, " in printed[0]
    assert "Best: attempt 1, try 2" in printed[0]
    assert "pass@1" in printed[1]
    assert (tmp_path / "search-nearest" / "best" / "build").is_dir()
    assert "right, twice" in (tmp_path / "search-nearest" / "best" / "CARD.md").read_text()
