"""Front matter: the YAML between two lines of dashes at the start of a Markdown file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

MAX_NODES = 2000
MAX_DEPTH = 20
MAX_PLAIN = 5000  # characters of an unquoted or tagged value: some are numbers of base 60, read in quadratic time

_DASHES = re.compile(r"^-{3,}\s*$", re.MULTILINE)

# libyaml is ten times as fast. Its composer recurses in C, so it gets only documents that `_check` has passed.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def split(text: str) -> tuple[str | None, str]:
    """Return the front matter, or None if there is none, and the text after it."""
    match _DASHES.split(text, maxsplit=2):
        case ["", front, body]:
            return front, body.lstrip("\r\n")
        case _:  # without a second line of dashes the first one is a rule
            return None, text


def parse(front: str) -> dict[str, Any]:
    """Return the keys and values of front matter.

    Raises:
        ValueError: If it is not YAML, not a table of keys and values, or exceeds a limit of this module.
    """
    try:
        _check(front)
        values = yaml.load(front, _Loader)
    # The loader's own errors, and its unexpected ones for values with tags: !!int '', !!bool x, !!timestamp x.
    except (yaml.YAMLError, ValueError, OverflowError, LookupError, AttributeError, TypeError) as error:
        raise ValueError(f"cannot be parsed: {error}") from error
    if not isinstance(values, dict):
        raise ValueError("is not a table of keys and values")  # noqa: TRY004
    return values


def _check(front: str) -> None:
    """Reject a document that is costly to build, by its events, which take time in proportion to its length.

    A few lines of aliases or merge keys (`<<`) can expand to billions of nodes, so aliases are not allowed.
    """
    if re.search(r"^%", front, re.MULTILINE):
        raise ValueError("directives (lines that begin with '%') are not allowed")
    nodes = depth = 0
    for event in yaml.parse(front, _Loader):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(f"aliases ('*{event.anchor}') are not allowed")  # noqa: TRY004
        if isinstance(event, yaml.ScalarEvent):
            is_converted = event.style in {None, ""} or event.tag is not None
            if is_converted and len(event.value) > MAX_PLAIN:
                raise ValueError(f"a value without quotes, or with a tag, has more than {MAX_PLAIN} characters")
        nodes += isinstance(event, yaml.NodeEvent)
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if nodes > MAX_NODES or depth > MAX_DEPTH:
            raise ValueError(f"it has more than {MAX_NODES} values, or more than {MAX_DEPTH} levels")


def join(values: Mapping[str, Any], body: str) -> str:
    """Return a Markdown file with front matter."""
    front = yaml.safe_dump(dict(values), sort_keys=False, default_flow_style=False, allow_unicode=True)
    return f"---\n{front.strip()}\n---\n\n{body}".strip()
