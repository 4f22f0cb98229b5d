"""Connections, with limits of number, time and size that uvicorn does not have.

A Hub is often alone: `kernel-builder hub serve` in a laboratory, without the proxy of `deploy/`. Behind one, the limits
of number and time are the proxy's, and these hold for what it lets through.
"""

from __future__ import annotations

import asyncio
import ctypes
import resource
import socket
from collections import Counter
from contextlib import suppress

from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kernel_hub.settings import ConnectionLimits

_M_MMAP_THRESHOLD = -3  # of malloc.h
_UNSENT_BYTES = 256 << 10


def raise_file_limit() -> int:
    """Raise this process's soft limit of open files, usually 1024, to the hard limit, and return it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most


def return_memory() -> None:
    """Make the C library return larger blocks to the system when they are freed.

    Otherwise it keeps those of many threads apart: 500 slow readers cost three times as much memory, for good.
    """
    with suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)


class LimitedConnection(HttpToolsProtocol):
    """One connection, with self.limits.

    - Connections, in all and of one address, so that one client cannot use up all of them.
    - The head of a request, and trailers, by time, size and count: the parser keeps all of them in memory.
    - Requests that wait for the answer to an earlier one: the parser makes each that a client sends at once.
    - The time in which a client has to receive what is sent to it, of which at most 256 KB wait.
    """

    limits: ConnectionLimits
    idle_seconds: float
    opened: Counter[str]

    _address: str | None = None  # if it is counted
    _waiting: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None
    _refusal: tuple[int, str, str] | None = None
    _unparsed = 0  # bytes since the last complete head or part of a body
    _head = 0
    _headers = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()
        with suppress(OSError):  # the kernel would otherwise buffer some megabytes
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
        address = self.client[0] if self.client else ""
        # All clients of a proxy come from its address. A proxy is whose headers uvicorn believes.
        if not (isinstance(self.app, ProxyHeadersMiddleware) and address in self.app.trusted_hosts):
            self._address = address
            self.opened[address] += 1
        if len(self.connections) > self.limits.connections or self.opened[address] > self.limits.connections_by_address:
            self._refuse(503, "Busy", "too many connections; close some, or try again later")

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._stop_writing()
        if self._address is not None:
            self.opened[self._address] -= 1
            if not self.opened[self._address]:
                del self.opened[self._address]
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        self._unparsed += len(data)
        super().data_received(data)
        if self._unparsed > self.limits.head_bytes and self._refusal is None:
            self._refuse(431, "HeadTooLarge", f"the head of a request has at most {self.limits.head_bytes} bytes")

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= self.limits.waiting_requests:
            self._stop(429, "TooManyRequests", f"at most {self.limits.waiting_requests} requests wait on a connection")
        super().on_message_begin()
        self._head = self._headers = 0
        self._wait()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > self.limits.url_bytes:
            self._stop(414, "UriTooLong", f"an address has at most {self.limits.url_bytes} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head += len(name) + len(value)
        self._headers += 1
        if self._headers > self.limits.headers or self._head > self.limits.head_bytes:
            what = f"at most {self.limits.headers} lines and {self.limits.head_bytes} bytes"
            self._stop(431, "HeadTooLarge", f"the head of a request has {what}")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._unparsed = 0
        self._stop_waiting()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unparsed = 0
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stalled is None:
            # Not `close`, which would wait for the client to read.
            self._stalled = self.loop.call_later(self.idle_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_writing()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        status, code, message = self._refusal or (400, "BadRequest", msg)
        self._refuse(status, code, message)

    def _stop(self, status: int, code: str, message: str) -> None:
        """End the parser; `send_400_response` is then called."""
        self._refusal = status, code, message
        raise ValueError(message)

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._refusal = status, code, message
        retry = "Retry-After: 2\r\n" if status == 503 else ""
        self.transport.write(
            f"HTTP/1.1 {status} {code}\r\nX-Error-Code: {code}\r\nX-Error-Message: {message}\r\n{retry}"
            f"Content-Type: text/plain; charset=utf-8\r\nContent-Length: {len(message)}\r\n"
            f"Connection: close\r\n\r\n{message}".encode("ascii", "replace")
        )
        self.transport.close()

    def _wait(self) -> None:
        if self._waiting is None:
            self._waiting = self.loop.call_later(self.idle_seconds, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _stop_writing(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None


def limited(limits: ConnectionLimits, idle_seconds: float) -> type[HttpToolsProtocol]:
    """Return the protocol class of a server with these limits."""

    class Limited(LimitedConnection):
        pass

    Limited.limits = limits
    Limited.idle_seconds = idle_seconds
    Limited.opened = Counter()
    return Limited
