"""Checks of untrusted paths: from a Hub's listing, an archive or a wheel.

A checked path stays below any directory that it is joined to, is valid on every file system, and can be printed.
"""

from __future__ import annotations

from collections.abc import Iterable

MAX_PATH, MAX_PART, MAX_DEPTH = 1024, 255, 32


class UnsafePath(ValueError):
    """A path that leaves its directory, or that is not valid. The message is safe to print."""


def checked_text(text: object) -> str:
    """Return a name, such as that of a branch, if it can be stored and printed.

    Raises:
        UnsafePath: If it is not a string, or has characters that cannot be displayed.
    """
    if not isinstance(text, str) or not 0 < len(text) <= MAX_PATH:
        raise UnsafePath(f"expected a name, got {ascii(text)[:100]}")
    if not text.isprintable():  # escapes of terminals, marks of direction, lone halves of surrogate pairs
        raise UnsafePath(f"the name {ascii(text)[:100]} has characters that cannot be shown")
    return text


def checked_path(path: object) -> str:
    """Return a relative path, with slashes, if it stays below the directory that it is joined to.

    Raises:
        UnsafePath: If it does not, or is not a valid path.
    """
    text = checked_text(path)
    parts = text.split("/")
    if not {"", ".", ".."}.isdisjoint(parts) or "\\" in text:
        raise UnsafePath(
            f"the path {ascii(text)[:100]} leaves its directory: expected a path without '.', '..' and '\\\\'"
        )
    if any(part.lower() == ".git" for part in parts):
        raise UnsafePath(f"the path {ascii(text)[:100]} is reserved by git")
    if len(text.encode()) > MAX_PATH or len(parts) > MAX_DEPTH or any(len(part.encode()) > MAX_PART for part in parts):
        raise UnsafePath(f"the path {ascii(text)[:100]} is too long")
    return text


def checked_tree(paths: Iterable[object]) -> list[str]:
    """Return the paths of files that can all be in one directory.

    Raises:
        UnsafePath: If a path leaves the directory, occurs twice, or is a parent of another path.
    """
    known: set[str] = set()
    directories: set[str] = set()
    for path in paths:
        text = checked_path(path)
        if text in known:
            raise UnsafePath(f"the path {text!r} occurs twice")
        known.add(text)
        parts = text.split("/")
        directories.update("/".join(parts[:depth]) for depth in range(1, len(parts)))
    if both := known & directories:
        raise UnsafePath(f"the path {min(both)!r} is a file and a directory")
    return list(known)
