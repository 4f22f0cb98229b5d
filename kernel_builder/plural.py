"""Numbers with their nouns, for messages."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Return `1 file` or `2 files`; `binary` becomes `binaries`."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun[:-1]}ies" if noun.endswith("ry") else f"{number} {noun}s"
