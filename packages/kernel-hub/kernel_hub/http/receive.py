"""Reading request bodies within limits of size and time."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from urllib.parse import unquote

import anyio
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kernel_hub.http.turns import Source, source_of
from kernel_hub.refusals import Refusal, answer, bad_request, busy, too_large
from kernel_hub.settings import RequestLimits

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_HOST = re.compile(r"(\[[0-9a-fA-F:.]{2,45}\]|[A-Za-z0-9._-]{0,255})(:\d{1,5})?")
# Routes whose handlers read the body as a stream and limit its size themselves.
_STREAMED = re.compile(r"/api/kernels/[^/]+/[^/]+/(commit|large)/")
_LISTS = re.compile(r"/api/[^/]+/[^/]+/[^/]+/(paths-info|preupload)/|/kernels/.*/(objects/batch|git-upload-pack)$")
# If one of these headers occurs twice, a proxy and the Hub could read different ones.
_ONCE = ("authorization", "content-type", "host", "x-hub-proxy-token", "x-forwarded-user", "x-forwarded-groups")


class BodyLimits:
    """Middleware that limits the size and duration of request bodies, and refuses malformed addresses.

    It keeps encoded slashes in path segments. Bodies that are not streamed are held in memory: each must be complete
    within a time limit, and large ones of one caller or address in its share of the memory, as what other handlers
    `hold`. `identify` sets the caller in a request's state, or raises a refusal, before a body is held.
    """

    def __init__(self, app: ASGIApp, limits: RequestLimits, identify: Callable[[Request], Awaitable[object]]) -> None:
        self._app = app
        self._limits = limits
        self._identify = identify
        self._held: dict[bool, Counter[Source]] = {True: Counter(), False: Counter()}  # with tokens, and without

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            scope["path"] = _in_segments(scope)
            _check_head(scope)
        except Refusal as refusal:
            await answer(refusal)(scope, receive, send)
            return
        streamed = scope["method"] in {"GET", "HEAD"} or _STREAMED.match(scope["path"]) is not None
        most = self._limits.list_bytes if _LISTS.match(scope["path"]) else self._limits.body_bytes
        end = None if streamed else time.monotonic() + self._limits.body_seconds
        held = 0
        source: Source | None = None
        more = True

        def hold(size: int) -> None:
            nonlocal held, source
            source = source or source_of(Request(scope))
            sources = self._held[source[0]]
            held += size
            sources[source] += size
            limit = self._limits.bodies_bytes
            is_full = sources.total() > limit and sources[source] > limit // len(sources)
            if size and is_full and held > self._limits.small_body_bytes:
                raise busy("too many of your requests have large bodies now; try again in a few seconds")

        scope.setdefault("state", {})["hold"] = hold

        async def limited() -> Message:
            nonlocal more
            if not more:  # waits for the client to disconnect
                return await receive()
            if not streamed and source is None:
                await self._identify(Request(scope))
            left = self._limits.idle_seconds
            try:
                with anyio.fail_after(left if end is None else min(left, end - time.monotonic())):
                    message = await receive()
            except TimeoutError:
                reason = "the body stalled or arrived too slowly; nothing was stored. Send it again."
                raise Refusal(408, reason, code="RequestTimeout") from None
            more = message["type"] == "http.request" and bool(message.get("more_body"))
            if not streamed:
                size = len(message.get("body", b""))
                if held + size > most:
                    raise too_large(f"the body is larger than {most} bytes")
                hold(size)
            return message

        try:
            await self._app(scope, limited, send)
        finally:
            if source is not None:
                self._held[source[0]] -= Counter({source: held})  # without sources that hold nothing


def _in_segments(scope: Scope) -> str:
    """Decode each segment of the path on its own, except for slashes and percent signs, which the routes decode.

    Clients send a ref such as refs/pr/1 as one segment, refs%2Fpr%2F1. ASGI servers decode it before the routing.
    """
    raw = scope.get("raw_path") or scope["path"].encode()
    try:
        parts = [unquote(part, errors="strict") for part in raw.decode("ascii").split("/")]
    except UnicodeDecodeError:
        raise bad_request("the address is not UTF-8 whose bytes beyond ASCII are written as %XX") from None
    if any(_CONTROL.search(part) for part in parts):
        raise bad_request("the address has a control character, such as NUL")
    return "/".join(part.replace("%", "%25").replace("/", "%2F") for part in parts)


def _check_head(scope: Scope) -> None:
    """Refuse text that git, SQLite or the file system would read as another text, and ambiguous or malformed heads."""
    if "\0" in unquote(scope["query_string"].decode("latin-1")):
        raise bad_request("the address has a NUL after its question mark")
    headers = Headers(scope=scope)
    twice = [name for name in _ONCE if len(headers.getlist(name)) > 1]
    if twice or ("transfer-encoding" in headers and "content-length" in headers):  # a proxy may read another one
        one = f"only one header {twice[0]}" if twice else "Content-Length or Transfer-Encoding, not both"
        raise Refusal(400, f"a request has {one}", code="BadRequest", headers={"Connection": "close"})
    if not _HOST.fullmatch(headers.get("host", "")):
        raise bad_request("the header Host is not the name or the address of a host")


async def blocks(request: Request, size: int = 256 << 10) -> AsyncIterator[bytes]:
    """Yield the body in blocks of about `size` bytes, or raise a refusal if the client disconnects before the end."""
    pending = bytearray()
    try:
        async for chunk in request.stream():
            pending += chunk
            if len(pending) >= size:
                yield bytes(pending)
                pending.clear()
    except ClientDisconnect:
        raise bad_request("the connection was closed before the end of the body; nothing was stored") from None
    if pending:
        yield bytes(pending)
