"""A pytest plugin that names every skipped test with the command that runs it.

    python -m pytest -p tests.skips [--strict-skips]

tests/skips.toml lists the skips that continuous integration accepts. With --strict-skips any other skip is a failure:
a test that silently stops running would otherwise look like one that passes.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest

from kernel_builder import toml_file

ACCEPTED = toml_file.read(Path(__file__).with_name("skips.toml"))["skip"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--strict-skips", action="store_true", help="fail if a skipped test is not in tests/skips.toml")


def _skipped(config: pytest.Config) -> dict[str, list[str]]:
    """Return reason -> the tests that were skipped for it."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    tests = defaultdict(list)
    for report in reporter.stats.get("skipped", []) if reporter else []:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        tests[reason.removeprefix("Skipped: ")].append(report.nodeid)
    return tests


def _command(reason: str) -> str | None:
    """Return the command that runs tests skipped for a reason, or None if the reason is not accepted."""
    return next((entry["run"] for entry in ACCEPTED if re.fullmatch(entry["reason"], reason)), None)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    skipped = _skipped(config)
    if skipped:
        terminalreporter.section("skipped, and the command that runs them")
    for reason, tests in sorted(skipped.items()):
        command = _command(reason) or "remove the reason: tests/skips.toml does not accept it"
        terminalreporter.write_line(f"{len(tests):4} {reason}: {command}")
        if _command(reason) is None:
            terminalreporter.write_line("".join(f"\n       {test}" for test in tests).lstrip("\n"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    if config.getoption("--strict-skips") and not hasattr(config, "workerinput"):
        unexpected = [reason for reason in _skipped(config) if _command(reason) is None]
        if unexpected and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
