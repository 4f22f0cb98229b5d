"""Reads TOML: files of users, with errors that name the line, and the builder's own tables."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from kernel_format.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# The memory that tomllib takes grows with the square of a dotted key's parts. No format here needs more than four.
_LONG_KEY = re.compile(r"""(?:\.[ \t]*(?:[\w-]{1,60}|"(?:[^"\\\n]|\\.){0,60}"|'[^'\n]{0,60}')[ \t]*){16}""")


def read(path: Path) -> dict[str, Any]:
    """Return the document in a file."""
    return parse(decode(path.read_bytes(), str(path)), str(path))


def decode(content: bytes, where: str) -> str:
    """Return the text of a file that is UTF-8, without a byte order mark."""
    try:
        # TOML has no byte order mark, but editors write one and the public parser accepts it.
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"line {line} is not UTF-8", where=where, hint="save the file in the encoding UTF-8"
        ) from error


def parse(text: str, where: str) -> dict[str, Any]:
    """Return the document that a text is."""
    if long_key := _LONG_KEY.search(text):
        line = text.count("\n", 0, long_key.start()) + 1
        raise ConfigError(f"line {line} has a key of more than 16 parts", where=where, hint="shorten it")
    try:
        document: dict[str, Any] = tomllib.loads(text)
        return document
    except (ValueError, RecursionError) as error:
        words = "too many nested brackets" if isinstance(error, RecursionError) else str(error)
        raise ConfigError(
            f"is not TOML: {words}", where=where, hint="correct the line that the message names"
        ) from error
