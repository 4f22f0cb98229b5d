"""Bodies as they come in: no more than allowed, no slower than allowed, never whole in memory."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from urllib.parse import unquote

import anyio
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kernel_builder.hub.server.refusals import bad_request, busy, too_large, too_slow
from kernel_builder.hub.server.settings import Limits

# Bodies that are read as they come, and counted by who reads them.
_STREAMED = re.compile(r"/api/kernels/[^/]+/[^/]+/(commit|large)/|/xet/")


class Bodies:
    """Middleware: path segments stay apart though a ref holds a slash, and no body is endless or stands still."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # The clients send a ref such as refs/pr/1 as one segment, refs%2Fpr%2F1. Servers decode that before they
        # route, so here each segment is decoded by itself, but for what would make two of it; see `segment`.
        raw = scope.get("raw_path") or scope["path"].encode()
        try:
            parts = [unquote(part, errors="strict") for part in raw.decode("ascii").split("/")]
        except UnicodeDecodeError:
            parts = [""]
        path = "/".join(part.replace("%", "%25").replace("/", "%2F") for part in parts)
        limit = None if _STREAMED.match(path) else self._limits.body_bytes
        received = 0

        async def limited() -> Message:
            nonlocal received
            try:
                with anyio.fail_after(self._limits.idle_seconds if more else None):
                    message = await receive()
            except TimeoutError:
                raise too_slow(self._limits.idle_seconds) from None
            received += len(message.get("body", b""))
            if limit is not None and received > limit:
                raise too_large(f"the body is larger than the {limit} bytes that this request may have")
            note(message)
            return message

        more = True

        def note(message: Message) -> None:
            # After the end of the body, `receive` waits for the client to go, which may take any time.
            nonlocal more
            more = message["type"] == "http.request" and bool(message.get("more_body"))

        scope["path"] = path
        await self._app(scope, limited, send)


def segment(value: str) -> str:
    """A path parameter as the client meant it."""
    return unquote(value)


class Slots:
    """How many bodies of files and commits are received at once."""

    def __init__(self, count: int) -> None:
        self._free = count

    @contextmanager
    def one(self) -> Iterator[None]:
        """Take a slot, or refuse."""
        if self._free <= 0:
            raise busy("too many uploads at once; try again in a moment")
        self._free -= 1
        try:
            yield
        finally:
            self._free += 1


async def blocks(request: Request, size: int = 256 << 10) -> AsyncIterator[bytes]:
    """The body in blocks of about this size.

    Raises:
        Refusal: The client has gone before the end.
    """
    pending: list[bytes] = []
    length = 0
    try:
        async for chunk in request.stream():
            pending.append(chunk)
            length += len(chunk)
            if length >= size:
                yield b"".join(pending)
                pending, length = [], 0
    except ClientDisconnect:
        raise bad_request("the connection was cut before the end of the body; nothing was stored") from None
    if pending:
        yield b"".join(pending)


async def lines(request: Request, *, longest: int, total: int) -> AsyncIterator[bytes]:
    """The lines of a body.

    Raises:
        Refusal: A line, or the whole, is longer than allowed.
    """
    rest = bytearray()
    received = 0
    async for block in blocks(request):
        received += len(block)
        if received > total:
            raise too_large(f"the commit is larger than {total} bytes; upload its large files first, as LFS")
        rest += block
        if b"\n" in block:
            *whole, last = bytes(rest).split(b"\n")
            rest = bytearray(last)
            for line in whole:
                if line.strip():
                    yield line
        if len(rest) > longest:
            raise too_large(f"one line of the commit is longer than {longest} bytes; upload large files first, as LFS")
    if rest.strip():
        yield bytes(rest)
