"""Numbers with their nouns, and lists, for messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def counted(number: int, noun: str) -> str:
    """Return `1 file` or `2 files`; `binary` becomes `binaries`."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun[:-1]}ies" if noun.endswith("ry") else f"{number} {noun}s"


def listed(items: Iterable[object]) -> str:
    """Return `a`, `a and b` or `a, b and c`."""
    *first, last = map(str, items)
    return f"{', '.join(first)} and {last}" if first else last


def some_of(names: Sequence[str], most: int) -> str:
    """Return at most so many of the names, and how many more there are: `a, b and 3 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
