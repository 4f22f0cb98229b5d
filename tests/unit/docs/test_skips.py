"""The plugin that names skipped tests."""

from __future__ import annotations

import pytest

from tests.support.places import SOURCES

pytest_plugins = ["pytester"]

SOURCE = SOURCES["skipped_tests"]


@pytest.mark.parametrize(
    ("reason", "options", "status", "line"),
    [
        ("needs a GPU", ["--strict-skips"], 0, "*1 needs a GPU: make gpu-test*"),
        ("no browser", ["--strict-skips"], 1, "*1 no browser: remove the reason*"),
        ("no browser", [], 0, "*1 no browser: remove the reason*"),
        ("no browser, which needs a GPU", ["--strict-skips"], 1, "*remove the reason*"),
        ("no browser", ["--strict-skips", "-p", "xdist", "-n", "1"], 1, "*1 no browser: remove the reason*"),
    ],
)
def test_only_listed_skips_are_accepted(
    pytester: pytest.Pytester, reason: str, options: list[str], status: int, line: str
) -> None:
    pytester.makepyfile(SOURCE.format(reason=reason))
    result = pytester.runpytest("-p", "tests.skips", *options)
    assert result.ret == status
    result.stdout.fnmatch_lines([line])
