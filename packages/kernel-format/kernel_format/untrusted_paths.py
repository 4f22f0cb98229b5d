"""Checks of untrusted paths: from a Hub's listing, an archive or a wheel.

A checked path stays below any directory that it is joined to, is valid on every file system, and can be printed.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

MAX_PATH, MAX_PART, MAX_DEPTH = 1024, 255, 32
# Characters that show nothing, though they are printable: fillers, joiners, selectors of variants.
_BLANK = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")
# Windows takes these for a device, a drive or another name, where a client would write outside of its cache. Names that
# it only cannot store, such as `a?`, are harmless.
_NOT_ON_WINDOWS = re.compile(
    r".*:.*|.*[. ]|(con|prn|aux|nul|(conin|conout|clock)\$|com[0-9¹²³]|lpt[0-9¹²³])( *\..*)?", re.IGNORECASE
)

# From these files of a work tree, git and git-lfs learn other servers, which they send the user's token to.
_CONFIGURES_GIT = {".gitmodules", ".lfsconfig"}


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


def portable_path(path: object) -> str:
    """Return a path that every system stores as one file, and shows with all of its characters.

    Raises:
        UnsafePath: If it is not.
    """
    text = checked_path(path)
    if _BLANK.search(text) or not unicodedata.is_normalized("NFC", text):
        raise UnsafePath(f"the path {ascii(text)[:100]} has invisible characters, or is not in Unicode's form NFC")
    for part in text.split("/"):
        if _NOT_ON_WINDOWS.fullmatch(part):
            raise UnsafePath(f"on Windows, {ascii(part)[:100]} in {ascii(text)[:100]} is not a file's name")
    return text


def publishable_path(path: object) -> str:
    """Return a portable path of a file that does not configure git, or raise UnsafePath."""
    text = portable_path(path)
    if not _CONFIGURES_GIT.isdisjoint(text.casefold().split("/")):
        raise UnsafePath(f"{text!r} configures the git commands of users who clone the repository")
    return text


def publishable_tree(paths: Iterable[object]) -> None:
    """Check the paths of files that are published together.

    Raises:
        UnsafePath: If a path cannot be published, or two are one file where case does not count.
    """
    known: dict[str, str] = {}
    for text in map(publishable_path, paths):
        parts = text.split("/")
        for part in ("/".join(parts[: depth + 1]) for depth in range(len(parts))):
            if (twin := known.setdefault(part.casefold(), part)) != part:
                raise UnsafePath(f"{twin!r} and {part!r} would be one file where case does not count")
