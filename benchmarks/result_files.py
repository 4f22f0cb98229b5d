"""Writes benchmarks/results: JSON in which what a table shows as one row is one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_LONGEST_LINE = 240


def write(path: Path, document: Any, *, sort_keys: bool = False) -> None:
    """Replace a file by a value as JSON. A list or an object that fits in a line is on one."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(_formatted(document, "", sort_keys) + "\n")
    new.replace(path)


def _formatted(value: Any, margin: str, sort_keys: bool) -> str:
    line = json.dumps(value, sort_keys=sort_keys)
    if not isinstance(value, (dict, list)) or not value or len(margin) + len(line) <= _LONGEST_LINE:
        return line
    inner = f"{margin} "
    if isinstance(value, dict):
        entries = sorted(value.items()) if sort_keys else value.items()
        parts = [f"{json.dumps(key)}: {_formatted(entry, inner, sort_keys)}" for key, entry in entries]
        return "{\n" + ",\n".join(inner + part for part in parts) + f"\n{margin}}}"
    return "[\n" + ",\n".join(inner + _formatted(entry, inner, sort_keys) for entry in value) + f"\n{margin}]"
