"""The README's tables of figures, and its section "Let an agent write it", as typed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.places import ROOT


@pytest.fixture
def readme_tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import readme_tables

    return readme_tables


def test_the_tables_are_written_from_the_results(readme_tables: ModuleType) -> None:
    readme = (ROOT / "README.md").read_text()
    assert readme_tables.fill(readme) == readme, "run benchmarks/readme_tables.py"


def test_only_what_is_between_the_markers_is_written(readme_tables: ModuleType) -> None:
    blocks = [
        f"<!-- figures: {name} -->\ntyped 0.99\n<!-- /figures -->\n"
        for name in ("kernels", "models", "generate", "builder")
    ]
    filled = readme_tables.fill("before\n" + "kept 0.99\n".join(blocks) + "after\n")
    assert filled.startswith("before\n") and filled.endswith("<!-- /figures -->\nafter\n")
    assert filled.count("kept 0.99\n") == 3 and "typed" not in filled
    assert readme_tables.fill(filled) == filled
    with pytest.raises(ValueError, match="must have <!-- figures: kernels -->"):
        readme_tables.fill("".join(blocks[1:]))


def test_several_cases_have_their_median_and_range(readme_tables: ModuleType) -> None:
    assert readme_tables.spread([0.43, 0.97, 0.91]) == "0.91 (0.43 to 0.97)"
    assert readme_tables.spread([62.1, 121.2], 0) == "92 (62 to 121)"
    assert readme_tables.spread([]) == "-"


@pytest.mark.timeout(300)
def test_the_commands_with_which_an_agent_writes_a_kernel(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text().partition("## Let an agent write it")[2].partition("\n## ")[0]
    commands = re.findall(r"^    (\.venv/.*)$", text, re.MULTILINE)
    assert len(commands) == 3
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    printed = []
    for command in commands:
        done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        printed.append(done.stdout + done.stderr)
    assert "attempt 1, try 1 (examples/search/scripted_agent.py): wrong: " in printed[0]
    assert "attempt 1, try 2 (examples/search/scripted_agent.py): right, " in printed[0]
    assert "Best: attempt 1, try 2" in printed[0]
    assert "pass@1" in printed[1]
    assert (tmp_path / "search-hard_swish" / "best" / "build").is_dir()
    assert "right, twice" in (tmp_path / "search-hard_swish" / "best" / "CARD.md").read_text()
