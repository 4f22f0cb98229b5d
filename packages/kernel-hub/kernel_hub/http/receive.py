"""Reading request bodies within limits of size and time."""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import unquote

import anyio
from anyio import to_thread
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kernel_hub.refusals import Refusal, answer, bad_request, busy, too_large, too_slow
from kernel_hub.settings import RequestLimits

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_HOST = re.compile(r"(\[[0-9a-fA-F:.]{2,45}\]|[A-Za-z0-9._-]{0,255})(:\d{1,5})?")

Result = TypeVar("Result")

# Routes whose handlers read the body as a stream and limit its size themselves.
_STREAMED = re.compile(r"/api/kernels/[^/]+/[^/]+/(commit|large)/|/xet/")


class BodyLimits:
    """Middleware that limits the size and duration of request bodies, and refuses addresses that are no text.

    It keeps encoded slashes in path segments.

    Bodies that are not streamed are held in memory. Each must be complete within a time limit, and all of them
    together have a size limit. Callers without a token of this Hub share a smaller one.
    """

    def __init__(self, app: ASGIApp, limits: RequestLimits, is_known: Callable[[str], bool]) -> None:
        self._app = app
        self._limits = limits
        self._is_known = is_known
        self._held = {True: 0, False: 0}

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
        if _STREAMED.match(scope["path"]):
            await self._app(scope, self._streamed(receive), send)
            return
        known, held = False, 0

        def hold(size: int) -> None:
            nonlocal known, held
            if not held:
                known = self._is_known(Headers(scope=scope).get("authorization", ""))
            held += size
            self._held[known] += size
            limit = self._limits.body_bytes if known else self._limits.strangers_body_bytes
            if held > limit:
                raise too_large(f"the body is larger than the {limit} bytes that this request may have")
            if self._held[known] > (self._limits.bodies_bytes if known else self._limits.strangers_bodies_bytes):
                raise busy("too many requests with large bodies at once; try again in a few seconds")

        try:
            await self._app(scope, self._whole(receive, hold), send)
        finally:
            self._held[known] -= held

    def _streamed(self, receive: Receive) -> Receive:
        """Limit the time until each part of a body arrives."""
        more = True

        async def limited() -> Message:
            nonlocal more
            message = await _in_time(receive, self._limits.idle_seconds if more else None)
            more = _has_more(message)
            return message

        return limited

    def _whole(self, receive: Receive, hold: Callable[[int], None]) -> Receive:
        """Limit the time until the whole body has arrived, and count its bytes as held."""
        until: float | None = None
        more = True

        async def limited() -> Message:
            nonlocal more, until
            now = time.monotonic()
            until = until or now + self._limits.body_seconds
            message = await _in_time(receive, min(self._limits.idle_seconds, until - now) if more else None)
            more = _has_more(message)
            if size := len(message.get("body", b"")):
                hold(size)
            return message

        return limited


async def _in_time(receive: Receive, seconds: float | None) -> Message:
    """Receive the next part of a body. After its end `receive` waits for the client to disconnect: no limit (None)."""
    try:
        with anyio.fail_after(seconds):
            return await receive()
    except TimeoutError:
        raise too_slow() from None


def _has_more(message: Message) -> bool:
    return message["type"] == "http.request" and bool(message.get("more_body"))


def _in_segments(scope: Scope) -> str:
    """Decode each segment of the path on its own, except for slashes and percent signs; `segment` decodes those.

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
    """Refuse what would reach git, SQLite or the file system as another text, and hosts that are no names."""
    if "\0" in unquote(scope["query_string"].decode("latin-1")):
        raise bad_request("the address has a NUL after its question mark")
    if not _HOST.fullmatch(Headers(scope=scope).get("host", "")):
        raise bad_request("the header Host is not the name or the address of a host")


def parse_json(data: bytes) -> Any:
    """Parse JSON.

    Raises:
        ValueError: If it is not JSON, or nested more deeply than Python's parser goes.
    """
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def segment(value: str) -> str:
    """Decode a path parameter that `BodyLimits` left encoded."""
    return unquote(value)


class Slots:
    """Limits how many uploads, commits or clones there are at once; one client has at most three quarters of them.

    A client that sends or takes a little all the time holds its slots for hours, and the others need some, too.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._share = max(1, count * 3 // 4)
        self._held: Counter[str] = Counter()

    @contextmanager
    def hold(self, client: str) -> Iterator[None]:
        """Hold one slot.

        Args:
            client: The name of a token, or an address.

        Raises:
            Refusal: If all are taken, or too many by this client.
        """
        if self._free <= 0 or self._held[client] >= self._share:
            raise busy("too many of these requests at once; try again in a few seconds")
        self._free -= 1
        self._held[client] += 1
        try:
            yield
        finally:
            self._free += 1
            self._held[client] -= 1
            if not self._held[client]:
                del self._held[client]


async def blocks(request: Request, size: int = 256 << 10) -> AsyncIterator[bytes]:
    """Yield the body in blocks of about `size` bytes.

    Raises:
        Refusal: If the client disconnects before the end.
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
        raise bad_request("the connection was closed before the end of the body; nothing was stored") from None
    if pending:
        yield b"".join(pending)


async def while_connected(
    request: Request, work: Callable[[Callable[[], bool]], Result], limiter: anyio.CapacityLimiter
) -> Result:
    """Run work in a thread, after the body of its request was read.

    Args:
        work: Takes a function that tells whether the client still waits. If it does not, or the server ends, the work
            is expected to end soon.
        limiter: Limits how many threads there are.
    """
    left = threading.Event()

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        left.set()

    outcome: list[Result] = []
    failure: Exception | None = None
    async with anyio.create_task_group() as group:
        group.start_soon(watch)
        try:
            outcome.append(await to_thread.run_sync(work, lambda: not left.is_set(), limiter=limiter))
        except Exception as error:  # raised below, since the group would put it into another
            failure = error
        finally:
            left.set()  # also where the server ends, and does not wait for the thread
            group.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return outcome[0]


async def lines(request: Request, *, longest: int, total: int) -> AsyncIterator[bytes]:
    """Yield the lines of a body.

    Raises:
        Refusal: If a line exceeds `longest` bytes, or the body `total` bytes.
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
