"""What benchmarks measured is kept as summaries, one line for what a table shows as a row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kernel_builder import toml_file
from tests.support.places import ROOT

MOST_LINES = 12_000


def test_the_results_are_summaries() -> None:
    lines = {path.name: path.read_text().count("\n") for path in ROOT.glob("benchmarks/results/*.json")}
    assert sum(lines.values()) <= MOST_LINES, sorted(lines.items(), key=lambda entry: -entry[1])[:5]


def test_a_row_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import result_files

    document = {"rows": [{"shape": [1, 2], "times": list(range(40))}] * 2, "long": ["x" * 200] * 2, "none": {}}
    result_files.write(tmp_path / "result.json", document)
    text = (tmp_path / "result.json").read_text()
    assert json.loads(text) == document
    assert text.count("\n") == 11 and text.count('"shape"') == sum('"shape"' in line for line in text.splitlines())
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_every_result_says_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import measured_sources

    entries = toml_file.read(measured_sources.MEASURED)
    for path in measured_sources.RESULTS.glob("*.json"):
        result = json.loads(path.read_text())
        records_packages = isinstance(result, dict) and ("variant" in result or "packages" in result)
        assert (path.stem in entries) != records_packages, path.name
    assert all((ROOT / source).exists() for entry in entries.values() for source in entry["sources"])
    for name in entries:
        assert f"{name}: commit `" in measured_sources.since([name])
