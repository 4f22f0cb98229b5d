"""The README's tables of figures are those of the results."""

from __future__ import annotations

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
