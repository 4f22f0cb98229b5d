"""Turns of callers: Python computes for one request at a time, and no caller may wait for all requests of another."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial, wraps
from inspect import signature
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import anyio
from anyio import to_thread
from starlette.requests import ClientDisconnect, Request

Result = TypeVar("Result")

current_request: ContextVar[Request] = ContextVar("current_request")


class Turns:
    """Threads of which each caller has a few at a time, as do all requests without a token together."""

    def __init__(self, threads: int, each: int) -> None:
        self.threads = anyio.CapacityLimiter(threads)
        self.each = each
        self.callers: WeakValueDictionary[str, anyio.Semaphore] = WeakValueDictionary()


async def take_turn(work: Callable[[], Result], kind: str = "long") -> Result:
    """Run work in a turn of the request's caller.

    Work of the kind `long` lists, renders or compares, `write` waits for locks and the disk, and other work is `quick`.
    """
    request = current_request.get()
    turns: Turns = request.app.state.turns[kind]
    # A signed address names its caller. If that is wrong, the work is a refusal.
    caller = getattr(request.state, "caller", request.query_params.get("by", ""))
    own = turns.callers.setdefault(caller, anyio.Semaphore(turns.each))
    with request.app.state.metrics.waiting.track_inprogress():
        await own.acquire()
    try:
        # The first reads the request's end. For quick work, the check would be a large part of the time.
        if kind != "quick" and (await request.is_disconnected() or await request.is_disconnected()):
            raise ClientDisconnect
        return await to_thread.run_sync(work, limiter=turns.threads)
    finally:
        own.release()


def in_turn(handler: Callable[..., Result], kind: str = "long") -> Callable[..., Any]:
    """Return a handler that runs a plain function in a turn of its caller."""

    @wraps(handler)
    async def handle(**values: Any) -> Result:
        return await take_turn(partial(handler, **values), kind)

    # Older versions of FastAPI would read the annotations, which are texts, in this module.
    handle.__signature__ = signature(handler, eval_str=True)  # type: ignore[attr-defined]
    return handle
