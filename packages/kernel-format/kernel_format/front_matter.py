"""Front matter: the YAML between two lines of dashes at the start of a Markdown file."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

import yaml

MAX_NODES = 2000  # an alias counts as the nodes that it refers to
MAX_DEPTH = 20
MAX_PLAIN = 5000  # characters of an unquoted or tagged value: some are numbers of base 60, read in quadratic time
MAX_SECONDS = 0.5

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

    A few lines of aliases or merge keys (`<<`) can expand to billions of nodes, so an alias counts as many nodes as
    the value of its anchor.
    """
    if re.search(r"^%", front, re.MULTILINE):
        raise ValueError("directives (lines that begin with '%') are not allowed")
    until = time.monotonic() + MAX_SECONDS
    nodes = 0
    open_anchors: list[tuple[str | None, int]] = []
    sizes: dict[str, int] = {}
    for event in yaml.parse(front, _Loader):
        anchor = getattr(event, "anchor", None)
        if isinstance(event, yaml.AliasEvent):
            if anchor not in sizes:
                raise ValueError(f"the alias '*{anchor}' is used before the end of its anchor")
            nodes += sizes[anchor]
        elif isinstance(event, yaml.ScalarEvent):
            nodes += 1
            if len(event.value) > MAX_PLAIN and (event.style in {None, ""} or event.tag is not None):
                raise ValueError(f"a value without quotes, or with a tag, has more than {MAX_PLAIN} characters")
            if anchor is not None:
                sizes[anchor] = 1
        elif isinstance(event, yaml.CollectionStartEvent):
            nodes += 1
            open_anchors.append((anchor, nodes - 1))
            if len(open_anchors) > MAX_DEPTH:
                raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_anchors.pop()
            if anchor is not None:
                sizes[anchor] = nodes - before
        if nodes > MAX_NODES:
            raise ValueError(
                f"it has more than {MAX_NODES} values, where an alias counts as the values that it refers to"
            )
        if time.monotonic() > until:
            raise ValueError(f"it takes longer than {MAX_SECONDS} s to read")


def join(values: Mapping[str, Any], body: str) -> str:
    """Return a Markdown file with front matter."""
    front = yaml.safe_dump(dict(values), sort_keys=False, default_flow_style=False, allow_unicode=True)
    return f"---\n{front.strip()}\n---\n\n{body}".strip()
