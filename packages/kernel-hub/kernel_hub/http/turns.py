"""Turns of callers: Python computes for one request at a time, and no caller may wait for all requests of another."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar
from weakref import WeakValueDictionary

import anyio
from anyio import to_thread
from prometheus_client import Gauge
from starlette.requests import Request

Result = TypeVar("Result")


class Turns:
    """Threads of which each caller has a few at a time, as do all requests without a token together."""

    def __init__(self, threads: int, each: int, waiting: Gauge) -> None:
        self._threads = anyio.CapacityLimiter(threads)
        self._each = each
        self._waiting = waiting
        self._callers: WeakValueDictionary[str, anyio.Semaphore] = WeakValueDictionary()

    async def run(self, request: Request, work: Callable[[], Result]) -> Result:
        """Run work for a request in a thread, when it is the caller's turn."""
        # A signed address names its caller. If that is wrong, the work is a refusal.
        caller = getattr(request.state, "caller", request.query_params.get("by", ""))
        own = self._callers.setdefault(caller, anyio.Semaphore(self._each))
        with self._waiting.track_inprogress():
            await own.acquire()
        try:
            return await to_thread.run_sync(work, limiter=self._threads)
        finally:
            own.release()


async def take_turn(request: Request, work: Callable[[], Result], kind: str = "long") -> Result:
    """Run work in a turn of a request's caller: `long` is what lists, renders or compares, and other work is `quick`."""
    turns: Turns = request.app.state.turns[kind]
    return await turns.run(request, work)
