"""Tokens and their permissions.

A token is 32 random bytes and is shown once. The token file holds its SHA-256; a random token needs no slower hash. A
token has a scope for each organization or repository: `read` sees private repositories, `write` also publishes. It may
have an end. The token of a proxy has groups instead: the proxy names users and their groups, which read organizations.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError

from kernel_format.errors import ConfigError
from kernel_format.files import locked, write_atomically
from kernel_hub import names
from kernel_hub.refusals import Refusal, wrong_token

ANY = "*"
KEY_LENGTH = 32


class Token(BaseModel):
    """A token as the token file describes it."""

    model_config = ConfigDict(frozen=True)

    name: str
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    scopes: dict[str, Literal["read", "write"]]  # of organizations, repositories, or "*" for all
    expires: StrictInt | None = None  # in seconds since 1970
    groups: dict[str, list[str]] | None = None  # of a proxy: group of users -> organizations that it reads

    def caller(self) -> Caller:
        """Return the caller who sends this token, or raise a refusal if the token has expired."""
        if self.expires is not None and self.expires <= time.time():
            message = f"the token {self.name!r} has expired on {day(self.expires)}: ask its operator for another"
            # Not 401, which the clients show as a repository that does not exist.
            raise Refusal(403, message, code="TokenExpired")
        return Caller(self.name, self.scopes, self.sha256[:KEY_LENGTH])


class _Tokens(BaseModel):
    """The content of the token file."""

    tokens: tuple[Token, ...]


@dataclass(frozen=True)
class Caller:
    """The sender of a request, with the scopes of its token. The name is empty without a token.

    `key` is the start of the token's SHA-256. Signed addresses and downloads carry it, so that they end with the token.
    """

    name: str = ""
    scopes: Mapping[str, str] = field(default_factory=dict)
    key: str = ""

    def _scopes_of(self, name: str) -> set[str]:
        """Return the scopes that cover an organization, or a repository: its own and its organization's."""
        return {self.scopes[scope] for scope in (name, name.partition("/")[0], ANY) if scope in self.scopes}

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


class AnyToken:
    """Accepts any token for writing. Used without a token file, when the server listens on loopback only."""

    def caller(self, token: str) -> Caller:
        """Return the caller who sends this token."""
        return self.caller_by_key("any")

    def user(self, proxy_token: str, user: str, groups: str) -> Caller:
        """Refuse the token of a proxy: there is none."""
        raise wrong_token()

    def caller_by_key(self, key: str) -> Caller:
        """Return the caller who was given a signed address."""
        return Caller(name="user", scopes={ANY: "write"}, key=key) if key else Caller()


class TokenFile:
    """The tokens of a file, which is read again when it changes: tokens can be added and removed while the Hub runs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # One attribute, since several threads read it.
        self._known: tuple[tuple[int, int, int] | None, tuple[Token, ...]] = (None, ())
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
        known = self._known
        if stamp != known[0]:
            known = self._known = (stamp, _read(self.path))
        return known[1]

    def caller(self, token: str) -> Caller:
        """Return the caller who sends this token, or raise a refusal if the token is unknown or has expired."""
        return self._matching(token, of_proxy=False).caller()

    def user(self, proxy_token: str, user: str, groups: str) -> Caller:
        """Return the user whom a proxy has signed on, who reads the organizations of the user's groups.

        Without a user's name, the caller is anonymous. `groups` are separated by commas.

        Raises:
            Refusal: If this is not a token of a proxy, or it has expired.
        """
        proxy = self._matching(proxy_token, of_proxy=True)
        proxy.caller()
        read = (proxy.groups or {}).get
        scopes = {name: "read" for group in groups.split(",") if group.strip() for name in read(group.strip(), [])}
        return Caller(user, scopes, proxy.sha256[:KEY_LENGTH]) if user else Caller()

    def _matching(self, token: str, *, of_proxy: bool) -> Token:
        digest = hashlib.sha256(token.encode()).hexdigest()
        # All tokens are compared in constant time, so that the time of the answer reveals nothing.
        matching = [known for known in self.tokens() if hmac.compare_digest(known.sha256, digest)]
        if not matching or (matching[0].groups is not None) != of_proxy:
            raise wrong_token()
        return matching[0]

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
    try:
        return _Tokens.model_validate_json(path.read_bytes()).tokens
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "JSON"
        expected = "expected a file that `kernel-hub token add` has written"
        message = f"this is not a token file ({place}: {first['msg']}); {expected}"
        raise ConfigError(message, where=str(path)) from error


def _locked(path: Path) -> AbstractContextManager[None]:
    """Hold the lock of a token file while it is read, changed and written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return locked(path.with_name(f".{path.name}.lock"))


def _write(path: Path, tokens: tuple[Token, ...]) -> None:
    write_atomically(path, _Tokens(tokens=tokens).model_dump_json(indent=2, exclude_none=True) + "\n", mode=0o600)


def day(seconds: int) -> str:
    """Format the end of a token."""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def parse_end(text: str) -> int:
    """Return when a token ends, in seconds since 1970: at the start of a day in UTC (2027-01-31), or in days (90d).

    Raises:
        ConfigError: If the text is neither, or the time has passed.
    """
    days = re.fullmatch(r"(\d{1,5})d", text)
    end = time.time() + int(days[1]) * 86400 if days else 0
    with suppress(ValueError):
        end = end or datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=timezone.utc).timestamp()
    if end <= time.time():
        raise ConfigError(
            f"expected a day to come or a number of days, not {text!r}",
            where="--expires",
            hint="--expires 2030-01-31, or --expires 90d",
        )
    return int(end)


def add(
    path: Path,
    name: str,
    *,
    read: tuple[str, ...],
    write: tuple[str, ...],
    groups: tuple[str, ...] = (),
    expires: int | None = None,
) -> str:
    """Create a token, add its hash to a file and return it.

    Args:
        groups: For the token of a proxy: `GROUP=ORG`, where ORG may be `*`.

    Raises:
        ConfigError: If the file has a token of this name, or a name or scope is not allowed.
    """
    if bool(read or write) == bool(groups):
        raise ConfigError(
            "a token needs a scope, or the token of a proxy groups",
            where="--read, --write, --group",
            hint="--write ORG, --read ORG or --read '*'; or --group GROUP=ORG",
        )
    by_group: dict[str, list[str]] = {}
    for pair in groups:
        group, _, organization = pair.rpartition("=")
        if not group.strip():  # a user without groups would be in it
            raise ConfigError(f"expected GROUP=ORG, not {pair!r}", where="--group", hint="--group GROUP=ORG")
        by_group.setdefault(group, []).append(organization)
    for checked in (name, *read, *write, *(pair.rpartition("=")[2] for pair in groups)):
        organization, slash, repository = checked.partition("/")
        if checked != ANY:
            try:
                names.repo_id(organization, repository if slash and checked != name else "x")
            except Refusal as refusal:
                raise ConfigError(refusal.message, where="name or scope") from None
    token = f"hf_{secrets.token_urlsafe(32)}"
    with _locked(path):
        tokens = _read(path) if path.exists() else ()
        if any(known.name == name for known in tokens):
            raise ConfigError(
                f"a token {name!r} exists already",
                where=str(path),
                hint=f"kernel-hub token remove {name} --token-file {path}",
            )
        described = {
            "name": name,
            "sha256": hashlib.sha256(token.encode()).hexdigest(),
            "scopes": {**dict.fromkeys(read, "read"), **dict.fromkeys(write, "write")},
            "expires": expires,
            "groups": by_group or None,
        }
        _write(path, (*tokens, Token.model_validate(described)))
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
            raise ConfigError(f"no token {name!r}", where=str(path), hint=f"kernel-hub token list --token-file {path}")
        _write(path, kept)
