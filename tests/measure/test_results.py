from __future__ import annotations

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from kernel_builder.cli import main
from kernel_builder.errors import ConfigError
from kernel_builder.measure import plot, tables
from kernel_builder.measure.results import OURS, Report

SVG = "{http://www.w3.org/2000/svg}"


def test_a_report_is_read_as_it_was_saved(report: Report, tmp_path: Path) -> None:
    report.save(tmp_path / "a.json")
    again = Report.read(tmp_path / "a.json")
    assert again.rows[0].place == report.rows[0].place
    assert again.rows[0].errors == report.rows[0].errors
    assert again.wrong() == [again.rows[2]]
    assert again.hosts[0].times[OURS].median == pytest.approx(3.2e-6)
    assert again.rows[0].times == {name: pytest.approx(time, rel=1e-3) for name, time in report.rows[0].times.items()}
    again.save(tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"a.json", "b.json"}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": [], "hosts": []}', '{"rows": [{}], "hosts": []}'])
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ConfigError, match="is not a result of `kernel-builder benchmark --json`"):
        Report.read(tmp_path / "a.json")


def test_errors_are_words_where_json_goes_to_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.json").write_text("{}")
    command = ["benchmark", "--from", str(tmp_path / "a.json"), "--json", str(tmp_path / "b.json")]
    monkeypatch.setattr(sys, "argv", ["kernel-builder", *command])
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 2 and done.stdout == ""
    assert done.stderr.startswith(f"error: {tmp_path / 'a.json'}: is not a result of")


def test_no_wrong_result_has_a_time(report: Report) -> None:
    table = tables.times(report.rows)
    assert table[0] == ["shape", "MB", "copy", "ours", "95%", "GB/s", "eager", "liger", "best peer / ours"]
    ours = ["12.5 (1.04)", "1.03-1.05", "2640"]
    assert table[1] == ["8x2048", "33.0", "13.0", *ours, "130 (0.10)", "13.5 (0.96)", "1.08 (liger)"]
    assert table[2] == ["8x128", "33.0", "13.0", *ours, "130 (0.10)", "failed", "10.40 (eager)"]
    assert table[3] == ["1x2x3", "33.0", "-", "WRONG", "-", "-", "-", "-", "-"]


def test_means_are_geometric(report: Report) -> None:
    assert tables.summary(report.rows)[1:] == [
        ["norm, forward, bfloat16", "1.04", "1.04", "3.35", "1.08", "10.40"],
        ["turn & <twist>, forward, bfloat16", "-", "-", "-", "-", "-"],
    ]
    assert tables.hosts(report.hosts) == [["operation", "pass", "ours", "eager"], ["norm", "forward", "3.2", "60.0"]]


def test_notes_name_all_that_is_missing(report: Report) -> None:
    assert tables.notes(report) == [
        "quack is absent: ModuleNotFoundError: No module named 'quack'",
        "norm, forward, bfloat16, 8x2048: eager was timed by events",
        "norm, forward, bfloat16, 8x128: liger: RuntimeError: no such shape",
        "norm, forward, bfloat16, 8x128: eager was timed by events",
        "turn & <twist>, forward, bfloat16, 1x2x3: ours: its error is 0.1 of its size, that of eager 0.0015",
        "95% intervals of times: half of them within 1.0%, all within 1.0%",
    ]


def test_tables_for_people_and_for_pages() -> None:
    table = [["shape", "us"], ["8x2048", "1.0"], ["8", "123.0"]]
    assert tables.as_text(table) == "shape      us\n8x2048    1.0\n8       123.0"
    assert tables.as_markdown(table) == "| shape | us |\n| --- | --- |\n| 8x2048 | 1.0 |\n| 8 | 123.0 |"


def test_a_picture_has_a_dot_for_each_share(report: Report) -> None:
    svg = ElementTree.fromstring(plot.draw(report))
    rows = [row for row in report.rows if OURS in row.shares]
    legend = 3
    assert len(svg.findall(f"{SVG}circle")) == legend + sum(len(row.shares) - 1 for row in rows)
    ours = [dot for dot in svg.findall(f"{SVG}circle") if dot.get("class") == "ours"][1:]
    assert len({dot.get("cx") for dot in ours}) == 1
    width = float(svg.get("viewBox", "").split()[2])
    assert all(0 < float(dot.get("cx", "")) < width for dot in svg.findall(f"{SVG}circle"))
    texts = [text.text for text in svg.findall(f"{SVG}text")]
    assert "8x128" in texts and "norm, forward, bfloat16" in texts


def test_a_report_without_rows_can_be_shown(report: Report, tmp_path: Path) -> None:
    report.rows = report.rows[2:]
    assert ElementTree.fromstring(plot.draw(report)) is not None
    report.rows, report.hosts = [], []
    assert ElementTree.fromstring(plot.draw(report)) is not None
    report.save(tmp_path / "a.json")
    assert json.loads((tmp_path / "a.json").read_text())["rows"] == []
