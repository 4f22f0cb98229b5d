"""Turns of callers: Python computes for one request at a time, and no caller may wait for all requests of another."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar
from weakref import WeakValueDictionary

import anyio
from anyio import to_thread
from starlette.requests import ClientDisconnect, Request

Result = TypeVar("Result")


class Turns:
    """Threads of which each caller has a few at a time, as do all requests without a token together."""

    def __init__(self, threads: int, each: int) -> None:
        self.threads = anyio.CapacityLimiter(threads)
        self.each = each
        self.callers: WeakValueDictionary[str, anyio.Semaphore] = WeakValueDictionary()


async def take_turn(request: Request, work: Callable[[], Result], kind: str = "long") -> Result:
    """Run work in a turn of a request's caller: `long` lists, renders or compares, and other work is `quick`."""
    turns: Turns = request.app.state.turns[kind]
    # A signed address names its caller. If that is wrong, the work is a refusal.
    caller = getattr(request.state, "caller", request.query_params.get("by", ""))
    own = turns.callers.setdefault(caller, anyio.Semaphore(turns.each))
    with request.app.state.metrics.waiting.track_inprogress():
        await own.acquire()
    try:
        if await request.is_disconnected() or await request.is_disconnected():  # the first reads the request's end
            raise ClientDisconnect
        return await to_thread.run_sync(work, limiter=turns.threads)
    finally:
        own.release()
