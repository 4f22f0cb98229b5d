"""Turns of callers: Python computes for one request at a time, and no caller may wait for all requests of another."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from functools import partial, wraps
from inspect import signature
from ipaddress import IPv6Address, ip_address
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import anyio
from anyio import to_thread
from starlette.requests import ClientDisconnect, Request

Result = TypeVar("Result")
Source = tuple[bool, str]

current_request: ContextVar[Request] = ContextVar("current_request")


class Turns:
    """Places of which each caller has a few at a time. Requests without a token have half as many, of their own."""

    def __init__(self, places: int, each: int) -> None:
        self.places = {True: anyio.CapacityLimiter(places), False: anyio.CapacityLimiter(places // 2)}
        self.each = each
        self.callers: WeakValueDictionary[Source, anyio.Semaphore] = WeakValueDictionary()


def source_of(request: Request) -> Source:
    """Return whether a request has a token, and the token's name or the address that the audit log names.

    An IPv6 address stands for its /56, which one household may have.
    """
    # A signed address names its caller. If that is wrong, the work is a refusal.
    if caller := getattr(request.state, "caller", request.query_params.get("by", "")):
        return True, caller
    host = request.client.host if request.client else ""
    with suppress(ValueError):
        address = ip_address(host)
        if isinstance(address, IPv6Address) and address.ipv4_mapped is None:
            return False, str(IPv6Address(int(address) >> 72 << 72))
    return False, host


@asynccontextmanager
async def turn(request: Request, kind: str) -> AsyncIterator[anyio.CapacityLimiter]:
    """Wait for one of the caller's turns, and yield the places for which it then waits with all others."""
    turns: Turns = request.app.state.turns[kind]
    source = source_of(request)
    own = turns.callers.setdefault(source, anyio.Semaphore(turns.each))
    with request.app.state.metrics.waiting.track_inprogress():
        await own.acquire()
    try:
        # The first reads the request's end. A clone ends with its client; quick work would take much longer.
        if kind not in {"quick", "clone"} and (await request.is_disconnected() or await request.is_disconnected()):
            raise ClientDisconnect
        yield turns.places[source[0]]
    finally:
        own.release()


def has_too_many(request: Request, kind: str) -> bool:
    """Return whether requests wait for places, and the caller has more than its equal part of them."""
    turns: Turns = request.app.state.turns[kind]
    places, own = turns.places[(source := source_of(request))[0]], turns.callers[source]
    callers = sum(known[0] == source[0] for known in turns.callers)
    return places.statistics().tasks_waiting > 0 and (turns.each - own.value) * callers > places.total_tokens


async def take_turn(work: Callable[[], Result], kind: str = "long") -> Result:
    """Run work in a turn of the request's caller.

    Work of the kind `long` lists, renders or compares, `write` waits for locks and the disk, and other work is `quick`.
    """
    async with turn(current_request.get(), kind) as threads:
        return await to_thread.run_sync(work, limiter=threads)


def in_turn(handler: Callable[..., Result], kind: str = "long") -> Callable[..., Any]:
    """Return a handler that runs a plain function in a turn of its caller."""

    @wraps(handler)
    async def handle(**values: Any) -> Result:
        return await take_turn(partial(handler, **values), kind)

    # Older versions of FastAPI would read the annotations, which are texts, in this module.
    handle.__signature__ = signature(handler, eval_str=True)  # type: ignore[attr-defined]
    return handle
