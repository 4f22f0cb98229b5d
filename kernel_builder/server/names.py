"""What may be the name of a repository, a ref or a path. Nothing else ever reaches the file system."""

from __future__ import annotations

import re
import unicodedata

from kernel_builder.server.refusals import bad_request

_PART = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?")
_REF_PART = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.+@-]{0,198}[A-Za-z0-9_+-])?")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
# Control and formatting characters, which make a path look like another one, and what UTF-8 cannot hold.
_UNSEEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}

MAX_PATH = 1024
MAX_DEPTH = 32
MAX_REF = 200


def repo_id(organization: str, name: str) -> str:
    """`organization/name`, if both are names that the Hub allows."""
    for what, part in (("organization", organization), ("repository name", name)):
        if not _PART.fullmatch(part) or ".." in part or "--" in part:
            raise bad_request(
                f"{what} {part[:100]!r} is not allowed: letters, digits, '_', and '.' or '-' inside, at most 96 of them"
            )
        if part.lower().endswith((".git", ".lock")):
            raise bad_request(f"{what} {part!r} may not end in .git or .lock")
    return f"{organization}/{name}"


def text(what: str, value: object) -> str:
    """Words for people that git can hold, and that show what they are."""
    if not isinstance(value, str) or "\0" in value or _SURROGATE.search(value):
        raise bad_request(f"{what} is not text that UTF-8 can hold")
    return value


def ref_name(name: str) -> str:
    """The short name of a branch or tag, e.g. `v1` or `fix/tail`."""
    parts = name.split("/")
    if (
        len(name) > MAX_REF
        or ".." in name
        or name.upper() == "HEAD"
        or not all(_REF_PART.fullmatch(part) and not part.endswith(".lock") for part in parts)
        or parts[0] == "refs"
    ):
        raise bad_request(f"{name[:100]!r} cannot be the name of a branch or tag; expected one like 'v1'")
    return name


def path(value: str) -> str:
    """A path inside a repository: relative, in plain parts, with no way out."""
    parts = value.split("/")
    if (
        not value
        or len(value.encode("utf-8", "surrogatepass")) > MAX_PATH
        or len(parts) > MAX_DEPTH
        or any(character == "\\" or unicodedata.category(character) in _UNSEEN for character in value)
        or any(part in {"", ".", ".."} or part.lower() == ".git" or len(part.encode()) > 255 for part in parts)
    ):
        raise bad_request(
            f"path {value[:100]!a} is not allowed: expected a relative path without '.', '..', '.git', empty parts "
            "or characters that cannot be seen"
        )
    return value


def sha256(value: object) -> str:
    """A SHA-256 in lower-case hex."""
    if not isinstance(value, str) or not _SHA256.fullmatch(value):
        raise bad_request(f"{str(value)[:100]!r} is not a SHA-256: expected 64 lower-case hex digits")
    return value
