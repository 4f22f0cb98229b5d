"""Front matter of Markdown files: split, parsed and written."""

from __future__ import annotations

import pytest

from kernel_builder import front_matter


@pytest.mark.parametrize(
    ("text", "front", "body"),
    [
        ("---\na: 1\n---\n\n# Title\n---\nmore\n", "\na: 1\n", "# Title\n---\nmore\n"),
        ("---\r\na: 1\r\n---\r\nbody", "\na: 1\r\n", "body"),
        ("# Title\n---\nrule\n---\n", None, "# Title\n---\nrule\n---\n"),
        ("---\nonly a rule\n", None, "---\nonly a rule\n"),
        ("", None, ""),
    ],
)
def test_split(text: str, front: str | None, body: str) -> None:
    found, rest = front_matter.split(text)
    assert (found and found.split(), rest) == (front and front.split(), body)


@pytest.mark.parametrize("front", ["a: [", "- a", "a", "a: " + "[" * 60_000])
def test_parse_refuses_everything_but_a_table(front: str) -> None:
    with pytest.raises(ValueError, match=r"cannot be parsed|not a table|nested too deeply"):
        front_matter.parse(front)


def test_join_and_split_are_inverse() -> None:
    values = {"tags": ["kernel"], "content": "é 🚀", "handler": None}
    front, body = front_matter.split(front_matter.join(values, "# Title\n\nwords"))
    assert front is not None
    assert (front_matter.parse(front), body) == (values, "# Title\n\nwords")
