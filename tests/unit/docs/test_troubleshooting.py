"""docs/troubleshooting.md quotes errors as the builder says them; a failure means that a message has changed."""

from __future__ import annotations

import ast
import re

import pytest

from kernel_format import errors
from tests.support.places import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
# Said by Torch, Python or the client.
ELSEWHERE = {"FileNotFoundError", "cu130", "Could not run", "with arguments from the 'CPU' backend"}


def quoted() -> list[str]:
    """Return the texts in the first column of the tables of errors."""
    rows = re.findall(r"^\| (`.*?) \| ", PAGE.partition("## Exit statuses")[0], re.MULTILINE)
    texts = [text for row in rows for text in re.findall(r"`(.*?)`", row)]
    return [text for text in texts if text not in ELSEWHERE]


@pytest.fixture(scope="module")
def said() -> str:
    """Every string of the packages' code, with its placeholders left out."""
    sources = [*(ROOT / "kernel_builder").rglob("*.py"), *ROOT.glob("packages/*/kernel_*/**/*.py")]
    constants = []
    for source in sources:
        if "templates" not in source.parts:
            for node in ast.walk(ast.parse(source.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    constants.append(node.value)
                elif isinstance(node, ast.JoinedStr):
                    words = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                    constants.append("".join(map(str, words)))
    return "\n".join(constants)


def test_there_are_thirty_errors() -> None:
    assert len(re.findall(r"^\| `", PAGE.partition("## Exit statuses")[0], re.MULTILINE)) >= 30


@pytest.mark.parametrize("text", quoted())
def test_an_error_is_quoted_as_it_is_said(said: str, text: str) -> None:
    assert text in said


def test_every_exit_status_is_listed() -> None:
    classes = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    for error in classes:
        if error not in (errors.KernelBuilderError, errors.SeveralErrors):
            (row,) = [line for line in PAGE.splitlines() if f"`{error.__name__}`" in line and line[2].isdigit()]
            assert int(row.split("|")[1]) == error.exit_code
