"""Front matter: the YAML between two lines of dashes at the start of a Markdown file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import frontmatter
import yaml
from frontmatter.default_handlers import YAMLHandler


def split(text: str) -> tuple[str | None, str]:
    """Return the front matter, or None if there is none, and the text after it."""
    handler = YAMLHandler()
    try:
        front, body = handler.split(text) if handler.detect(text) else (None, text)
    except ValueError:  # no second line of dashes: the first one is a rule
        return None, text
    return front, body.lstrip("\r\n")


def parse(front: str) -> dict[str, Any]:
    """Return the keys and values of front matter.

    Raises:
        ValueError: If it is not YAML, or not a table of keys and values.
    """
    try:
        # Not by the handler, which uses libyaml: deep nesting overflows its stack and kills the process.
        values = yaml.safe_load(front)
    except yaml.YAMLError as error:
        raise ValueError(f"cannot be parsed: {error}") from error
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    if not isinstance(values, dict):
        raise ValueError("is not a table of keys and values")  # noqa: TRY004
    return values


def join(values: Mapping[str, Any], body: str) -> str:
    """Return a Markdown file with front matter."""
    post = frontmatter.Post(body)
    post.metadata = dict(values)
    return frontmatter.dumps(post, sort_keys=False, Dumper=yaml.SafeDumper)
