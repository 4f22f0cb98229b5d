"""The tokens that an agent used, where its output says so."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

# Parts of other counts.
_INCLUDED = ("cached_input_tokens", "reasoning_output_tokens")


def reported_tokens(output: str) -> int | None:
    """Return the tokens that the output of an agent reports, read and written ones together; None if it reports none.

    The formats are those of `claude -p --output-format json` and `stream-json`, whose last object has the total, and of
    `codex exec --json`, which has one object for each turn. Other agents may print `{"usage": {"total_tokens": N}}`.
    """
    total: int | None = None
    for line in output.splitlines():
        if '"usage"' not in line:
            continue
        try:
            event = json.loads(line)
        except ValueError:
            continue
        usage = event.get("usage") if isinstance(event, dict) else None
        if isinstance(usage, dict):
            is_turn = event.get("type") == "turn.completed"
            total = _sum(usage) + (total or 0 if is_turn else 0)
    return total


def _sum(usage: Mapping[str, Any]) -> int:
    counts = {name: value for name, value in usage.items() if name.endswith("_tokens") and isinstance(value, int)}
    if "total_tokens" in counts:
        return int(counts["total_tokens"])
    return sum(value for name, value in counts.items() if name not in _INCLUDED)
