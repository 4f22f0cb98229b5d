"""Progress reports: a status line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io

import pytest

from kernel_builder.progress import shown


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_the_last_report_and_keeps_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "12")
    stream = Terminal()
    with shown(stream) as progress:
        progress.advance("building", 1, 2, detail="a long title of a step")
        progress.say("a message that is longer than the terminal")
        progress.advance("nvcc.whl", 500_000, 2_000_000, unit="bytes")
    assert [line.rpartition("\r\033[K")[2] for line in stream.getvalue().split("\n")] == [
        "a message that is longer than the terminal",
        "",
    ]
    assert "\r\033[K[1/2] a lon\r" in stream.getvalue()


def test_a_log_has_each_step_and_few_lines_for_a_download() -> None:
    stream = io.StringIO()
    with shown(stream) as progress:
        progress.advance("building", 1, 2, detail="first")
        progress.advance("building", 2, 2, detail="second")
        for done in (1, 2, 3, 4):
            progress.advance("nvcc.whl", done * 1_000_000, 4_000_000, unit="bytes")
    assert stream.getvalue().splitlines() == [
        "[1/2] first",
        "[2/2] second",
        "nvcc.whl: 1.0 of 4.0 MB",
        "nvcc.whl: 4.0 of 4.0 MB",
    ]
