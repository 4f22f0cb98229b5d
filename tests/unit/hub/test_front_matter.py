"""Front matter of Markdown files: split, parsed and written."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import yaml

from kernel_format import front_matter


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
    matter, rest = front_matter.split(text)
    assert (matter and matter.split(), rest) == (front and front.split(), body)


TAGGED = ("!!timestamp x", "!!int ''", "!!int +", "!!float '_'", "!!bool x", "!!set [a]", "!!binary é")


@pytest.mark.parametrize("front", ["a: [", "- a", "a", "a: " + "[" * 60_000, *(f"a: {value}" for value in TAGGED)])
def test_parse_refuses_everything_but_a_table(front: str) -> None:
    with pytest.raises(ValueError, match=r"cannot be parsed|not a table"):
        front_matter.parse(front)


@pytest.mark.parametrize(
    ("front", "reason"),
    [
        ("a: &a {x: 1}\nb: {<<: *a}", "aliases"),
        ("a: [" + "1," * 30_000 + "]", "more than 2000 values"),
        ("a: " + "{a: " * 16_000, "levels"),
        ("a: " + "1:" * 30_000 + "1", "more than 5000 characters"),
        ("a: !!int '" + "1:" * 30_000 + "1'", "more than 5000 characters"),
        ("".join(f"%TAG !a{number}! !b!\n" for number in range(4000)) + "---\na: b", "directives"),
        ("a: 2026-02-30", "out of range"),
        ("a: 1" + ":1" * 2000 + ".5", "too large"),
    ],
)
def test_costly_yaml_is_refused_at_once(front: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    built = Mock(wraps=yaml.load)
    monkeypatch.setattr(yaml, "load", built)
    with pytest.raises(ValueError, match=reason):
        front_matter.parse(front)
    assert not built.called or len(front) < front_matter.MAX_PLAIN


def test_join_and_split_are_inverse() -> None:
    values = {"tags": ["kernel"], "content": "é 🚀", "handler": None}
    front, body = front_matter.split(front_matter.join(values, "# Title\n\nwords"))
    assert front is not None
    assert (front_matter.parse(front), body) == (values, "# Title\n\nwords")
