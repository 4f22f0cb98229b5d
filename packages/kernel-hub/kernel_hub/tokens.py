"""Tokens and their permissions.

A token is 32 random bytes and is shown once. The token file holds its SHA-256; a random token needs no slower hash. A
token has a scope for each organization or repository: `read` sees private repositories, `write` also publishes. It may
have an end.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from kernel_format.errors import ConfigError
from kernel_format.files import locked, write_atomically
from kernel_hub import names
from kernel_hub.refusals import Refusal, expired_token, forbidden, no_token, wrong_token

ANY = "*"
SCOPES = ("read", "write")
KEY_LENGTH = 32


@dataclass(frozen=True)
class Token:
    """A token as the token file describes it."""

    name: str
    sha256: str
    scopes: Mapping[str, str]  # organization, repository, or "*" for every one -> "read" or "write"
    expires: int | None = None  # in seconds since 1970

    def caller(self) -> Caller:
        """Return the caller who sends this token.

        Raises:
            Refusal: If the token has expired.
        """
        if self.expires is not None and self.expires <= time.time():
            raise expired_token(self.name, day(self.expires))
        return Caller(self.name, self.scopes, self.sha256[:KEY_LENGTH])


@dataclass(frozen=True)
class Caller:
    """The sender of a request, with the scopes of its token. The name is empty without a token.

    `key` is the start of the token's SHA-256. Signed addresses carry it, so that they end with the token.
    """

    name: str = ""
    scopes: Mapping[str, str] = field(default_factory=dict)
    key: str = ""

    def _scopes_of(self, name: str) -> set[str]:
        """Return the scopes that cover an organization, or a repository: its own and its organization's."""
        covering = (name, name.partition("/")[0], ANY)
        return {self.scopes[scope] for scope in covering if scope in self.scopes}

    def may_see(self, name: str) -> bool:
        """Return whether this caller sees a private repository, or all of an organization."""
        return bool(self._scopes_of(name))

    def seen(self) -> list[str] | None:
        """Return the organizations and repositories whose private parts this caller sees. None: all."""
        return None if ANY in self.scopes else list(self.scopes)

    def organizations(self) -> set[str]:
        """Return the organizations for which this caller has a scope, or for one of whose repositories."""
        return {name.partition("/")[0] for name in self.scopes if name != ANY}

    def may_write(self, name: str) -> bool:
        """Return whether this caller may publish in a repository, or in all of an organization."""
        return "write" in self._scopes_of(name)

    def must_write(self, name: str) -> None:
        """Raise a refusal unless this caller may publish in a repository, or in all of an organization."""
        if not self.name:
            raise no_token(f"writing to {name} needs a token: pass token=… or set HF_TOKEN")
        if not self.may_write(name):
            raise forbidden(
                f"the token {self.name!r} may only read {name}"
                if self.may_see(name)
                else f"the token {self.name!r} has no write scope for {name}"
            )


class AnyToken:
    """Accepts any token for writing. Used without a token file, when the server listens on loopback only."""

    def caller(self, token: str | None) -> Caller:
        """Return the caller who sends this token."""
        return self.caller_by_key("any") if token else Caller()

    def caller_by_key(self, key: str) -> Caller:
        """Return the caller who was given a signed address."""
        return Caller(name="user", scopes={ANY: "write"}, key=key) if key else Caller()


class TokenFile:
    """The tokens of a file, which is read again when it changes: tokens can be added and removed while the Hub runs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp: tuple[int, int, int] | None = None
        self._tokens: tuple[Token, ...] = ()
        self.tokens()

    def tokens(self) -> tuple[Token, ...]:
        """Return all tokens.

        Raises:
            ConfigError: If the file does not exist or is not a token file.
        """
        try:
            stat = self.path.stat()
        except FileNotFoundError:
            raise ConfigError(
                "the token file does not exist",
                where=str(self.path),
                hint=f"kernel-hub token add NAME --write ORG --token-file {self.path}",
            ) from None
        stamp = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
        if stamp != self._stamp:
            self._tokens = _read(self.path)
            self._stamp = stamp
        return self._tokens

    def caller(self, token: str | None) -> Caller:
        """Return the caller who sends this token.

        Raises:
            Refusal: If the token is unknown or has expired.
        """
        if not token:
            return Caller()
        digest = hashlib.sha256(token.encode()).hexdigest()
        # All tokens are compared in constant time, so that the time of the answer reveals nothing.
        matching = [known for known in self.tokens() if hmac.compare_digest(known.sha256, digest)]
        if not matching:
            raise wrong_token()
        return matching[0].caller()

    def caller_by_key(self, key: str) -> Caller:
        """Return the caller who was given a signed address.

        Raises:
            Refusal: If that token was removed or has expired meanwhile.
        """
        for known in self.tokens():
            if known.sha256[:KEY_LENGTH] == key:
                return known.caller()
        if not key:
            return Caller()
        raise wrong_token()


def _read(path: Path) -> tuple[Token, ...]:
    where = str(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        tokens = []
        for item in content["tokens"]:
            token = Token(item["name"], item["sha256"], dict(item["scopes"]), item.get("expires"))
            if not re.fullmatch(r"[0-9a-f]{64}", token.sha256) or not set(token.scopes.values()) <= set(SCOPES):
                raise ValueError(f"token {token.name!r}: expected a SHA-256 and scopes of 'read' or 'write'")
            if token.expires is not None and type(token.expires) is not int:
                raise ValueError(f"token {token.name!r}: expected 'expires' in seconds since 1970")
            tokens.append(token)
        return tuple(tokens)
    except (ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"this is not a token file ({error}); expected a file that `kernel-hub token add` has written", where=where
        ) from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a token file while it is read, changed and written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.with_name(f".{path.name}.lock")):
        yield


def _write(path: Path, tokens: tuple[Token, ...]) -> None:
    content = {"tokens": [_described(token) for token in tokens]}
    write_atomically(path, json.dumps(content, indent=2) + "\n", mode=0o600)


def _described(token: Token) -> dict[str, object]:
    described: dict[str, object] = {"name": token.name, "sha256": token.sha256, "scopes": dict(token.scopes)}
    return described if token.expires is None else {**described, "expires": token.expires}


def day(seconds: int) -> str:
    """Format the end of a token."""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def parse_end(text: str) -> int:
    """Return when a token ends, in seconds since 1970: at the start of a day in UTC (2027-01-31), or in days (90d).

    Raises:
        ConfigError: If the text is neither, or the time has passed.
    """
    try:
        end: int | None
        if days := re.fullmatch(r"(\d{1,5})d", text):
            end = int(time.time()) + int(days[1]) * 86400
        else:
            end = int(datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=timezone.utc).timestamp())
    except ValueError:
        end = None
    if end is None or end <= time.time():
        raise ConfigError(
            f"expected a day to come or a number of days, not {text!r}",
            where="--expires",
            hint="--expires 2030-01-31, or --expires 90d",
        )
    return end


def add(path: Path, name: str, *, read: tuple[str, ...], write: tuple[str, ...], expires: int | None = None) -> str:
    """Create a token, add its hash to a file and return it.

    Raises:
        ConfigError: If the file has a token of this name, or a name or scope is not allowed.
    """
    if not read and not write:
        raise ConfigError(
            "a token needs a scope", where="--read, --write", hint="--write ORG, --read ORG, or --read '*'"
        )
    for checked in (name, *read, *write):
        organization, slash, repository = checked.partition("/")
        if checked != ANY:
            try:
                names.repo_id(organization, repository if slash and checked != name else "x")
            except Refusal as refusal:
                raise ConfigError(refusal.message, where="name or scope") from None
    token = f"hf_{secrets.token_urlsafe(32)}"
    scopes = {**dict.fromkeys(read, "read"), **dict.fromkeys(write, "write")}
    with _locked(path):
        tokens = _read(path) if path.exists() else ()
        if any(known.name == name for known in tokens):
            raise ConfigError(
                f"a token {name!r} exists already",
                where=str(path),
                hint=f"kernel-hub token remove {name} --token-file {path}",
            )
        _write(path, (*tokens, Token(name, hashlib.sha256(token.encode()).hexdigest(), scopes, expires)))
    return token


def remove(path: Path, name: str) -> None:
    """Remove a token from a file; running servers refuse it from then on.

    Raises:
        ConfigError: If there is no token of this name.
    """
    with _locked(path):
        tokens = TokenFile(path).tokens()
        kept = tuple(token for token in tokens if token.name != name)
        if len(kept) == len(tokens):
            raise ConfigError(f"there is no token {name!r}", where=str(path), hint="kernel-hub token list")
        _write(path, kept)
