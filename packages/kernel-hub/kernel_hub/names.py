"""Validation of the names of repositories, refs and paths. No other name reaches the file system."""

from __future__ import annotations

import re

from kernel_format.untrusted_paths import UnsafePath, portable_path, publishable_path
from kernel_hub.refusals import bad_request

_PART = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?")
_REF_PART = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.+@-]{0,198}[A-Za-z0-9_+-])?")
_SHA256 = re.compile(r"[0-9a-f]{64}")
COMMIT = re.compile(r"[0-9a-f]{40}")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
MAX_REF = 200
MAX_TEXT = 20_000


def repo_id(organization: str, name: str) -> str:
    """Return `organization/name` if the Hub allows both names."""
    for kind, part in (("organization", organization), ("repository name", name)):
        if not _PART.fullmatch(part) or ".." in part or "--" in part:
            allowed = "letters, digits, '_', and '.' or '-' inside, at most 96 of them"
            raise bad_request(f"{kind} {part[:100]!r} is not allowed: {allowed}")
        if part.lower().endswith((".git", ".lock")):
            raise bad_request(f"{kind} {part!r} may not end in .git or .lock")
    return f"{organization}/{name}"


def checked(identifier: str) -> str:
    """Return the id of a repository if the Hub allows it."""
    organization, _, name = identifier.partition("/")
    return repo_id(organization, name)


def is_text(value: str) -> bool:
    """Return whether a string can be written as UTF-8, and has no NUL, which C takes for its end."""
    return "\0" not in value and not _SURROGATE.search(value)


def text(name: str, value: object) -> str:
    """Return a message if git can store it and lists of commits can show it. `name` is its name in errors."""
    if not isinstance(value, str) or not is_text(value):
        raise bad_request(f"{name} is not valid UTF-8 text without NUL")
    if len(value) > MAX_TEXT:
        raise bad_request(f"{name} has {len(value)} characters; at most {MAX_TEXT} are allowed")
    return value


def ref_name(name: str) -> str:
    """Return the short name of a branch or tag, e.g. `v1` or `fix/tail`, if it is allowed."""
    parts = name.split("/")
    if (
        len(name) > MAX_REF
        or ".." in name
        or name.upper() == "HEAD"
        or not all(_REF_PART.fullmatch(part) and not part.endswith(".lock") for part in parts)
        or parts[0] == "refs"
        or COMMIT.fullmatch(name)
    ):
        raise bad_request(f"{name[:100]!r} cannot be the name of a branch or tag; expected one like 'v1'")
    return name


def new_branch(name: str) -> str:
    """Return the name of a branch if it is allowed, and no second name of a version: clients read v1_0 as 10."""
    if re.fullmatch(r"v[+-]?[0-9_]+", ref_name(name)) and not re.fullmatch(r"v(0|[1-9][0-9]{0,8})", name):
        raise bad_request(f"the branch {name[:100]!r} is read as a version by some clients; expected one like 'v1'")
    return name


def path(value: str, *, is_new: bool = False) -> str:
    """Return a relative path if it is in a repository, shows all its characters, and may be written."""
    try:
        return publishable_path(value) if is_new else portable_path(value)
    except UnsafePath as error:
        raise bad_request(f"path {value[:100]!a} is not allowed: {error}") from None


def sha256(value: object) -> str:
    """Return the value if it is a SHA-256 in lower-case hex."""
    if not isinstance(value, str) or not _SHA256.fullmatch(value):
        raise bad_request(f"{str(value)[:100]!r} is not a SHA-256: expected 64 lower-case hex digits")
    return value
