"""Clients that send or read without end: slow bodies, endless heads, ambiguous requests, and stalled readers."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress

import anyio
import pytest
from raw_requests import memory, target
from starlette.types import Message, Receive, Scope, Send

from kernel_hub.http.receive import BodyLimits
from kernel_hub.refusals import Refusal
from kernel_hub.settings import RequestLimits
from tests.support.running_hub import RunningHub, running_hub
from tests.support.small_kernel import publish_kernel, write_kernel

pytestmark = pytest.mark.attack


def test_slow_and_large_bodies_are_refused() -> None:
    """A body must be complete in time, and all bodies in memory share a limit."""
    limits = RequestLimits(idle_seconds=0.2, body_seconds=0.5, body_bytes=100, bodies_bytes=150)
    codes: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            while (await receive()).get("more_body"):
                pass
        except Refusal as refusal:
            codes.append(refusal.code)
        else:
            codes.append("read")

    async def ask(parts: list[tuple[float, int]], path: str = "/x") -> None:
        arriving = iter(parts)

        async def receive() -> Message:
            wait, size = next(arriving)
            await anyio.sleep(wait)
            return {"type": "http.request", "body": bytes(size), "more_body": size > 0}

        async def send(message: Message) -> None:
            pass

        scope = {"type": "http", "path": path, "query_string": b"", "headers": [(b"host", b"x")]}
        await limited(scope, receive, send)

    limited = BodyLimits(app, limits)

    async def ask_all() -> None:
        await ask([(0, 60), (0, 0)])
        await ask([(0, 60), (1, 0)])  # stalls
        await ask([(0.1, 1)] * 9)  # too slow
        await ask([(0, 101), (0, 0)])
        await ask([(0.1, 101)] * 8 + [(0, 0)], "/api/kernels/a/one/large/x")  # is streamed
        async with anyio.create_task_group() as group:
            for _ in range(2):
                group.start_soon(ask, [(0, 90), (0.1, 0)])
        await ask([(0, 90), (0, 0)])

    anyio.run(ask_all)
    slow = ["RequestTimeout", "RequestTimeout"]
    assert codes == ["read", *slow, "PayloadTooLarge", "read", "Busy", "read", "read"]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningHub]:
    """A Hub with one kernel, for tests that leave it as it is."""
    directory = tmp_path_factory.mktemp("shared")
    with running_hub(directory) as hub:
        publish_kernel(hub, write_kernel(directory / "kernel"))
        yield hub


POST = b"POST /api/validate-yaml HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


FLOODS = {  # the start of a request, and the bytes that follow it again and again
    "lines": (b"GET /health HTTP/1.1\r\nHost: localhost\r\n", b"X: y\r\n" * 10_000),
    "a line": (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ", b"y" * 60_000),
    "an address": (b"GET /", b"y" * 60_000),
    "trailers": (CHUNKED + b"0\r\n", b"X: y\r\n" * 10_000),
    "a chunk's extension": (CHUNKED + b"1;x=", b"y" * 60_000),
}


@pytest.mark.parametrize("flood", FLOODS)
def test_endless_heads_are_refused_early(shared: RunningHub, flood: str) -> None:
    start, more = FLOODS[flood]
    before = memory(shared)
    sent = 0
    with socket.create_connection(target(shared.url)) as connection:
        connection.settimeout(5)
        with suppress(OSError):
            connection.sendall(start)
            while sent < 100_000_000:
                connection.sendall(more)
                sent += len(more)
        with suppress(ConnectionResetError):  # the response is lost if the client was still sending
            assert connection.recv(100).startswith(b"HTTP/1.1 4")
    assert sent < 20_000_000
    assert memory(shared) - before < 10


@pytest.mark.parametrize(
    "head",
    [
        POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
        POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\n Folded: y\r\nX : y\r\n\r\n",
    ],
)
def test_ambiguous_requests_are_refused(shared: RunningHub, head: bytes) -> None:
    """A proxy may read them differently: a second request could be smuggled through it."""
    with socket.create_connection(target(shared.url)) as connection:
        connection.settimeout(5)
        connection.sendall(head + b"GET /api/whoami-v2 HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = connection.recv(4096)
        assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 501")), answer
        assert answer.count(b"HTTP/1.1 ") == 1
