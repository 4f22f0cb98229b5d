"""Waiting for locks on behalf of requests, without a worker thread: a thread is used only while a lock is held.

A proxy cannot do this: it does not know which requests wait for one repository, and those that do must not take the
threads that others need.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar
from weakref import WeakValueDictionary

import anyio
from anyio import to_thread
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kernel_hub.refusals import NotFree, busy
from kernel_hub.storage import locks

WAITING = 32  # requests that wait for one repository
WRITERS = 16  # threads that write; readers have others, so a slow disk does not keep reads and /health waiting
_LONGEST_POLL = 0.1
# The addresses that must be answered while everything else waits.
_AT_ONCE = {"/health", "/metrics"}
_LEAVE = "kernel_builder.leave_turn"  # in the scope of a request that has a place

Result = TypeVar("Result")


class Turns:
    """Runs changes of repositories, each as soon as it can have the locks that it needs.

    The requests of this server that change one repository take turns: one at a time, first come, first served.
    """

    def __init__(self) -> None:
        self._turns: WeakValueDictionary[str, anyio.Lock] = WeakValueDictionary()
        self._writers = anyio.CapacityLimiter(WRITERS)

    async def change(self, repo_id: str, attempt: Callable[[], Result]) -> Result:
        """Run a change of a repository in a thread, after those that came before it.

        Args:
            repo_id: The repository.
            attempt: Makes the change. It raises `NotFree`, before it has changed anything, if a lock is taken.

        Raises:
            Refusal: If the locks are not free in time, or too many requests wait already.
        """
        until = time.monotonic() + locks.LOCK_SECONDS
        turn = self._turns.setdefault(repo_id, anyio.Lock())
        if turn.statistics().tasks_waiting >= WAITING:
            raise busy(f"{WAITING} requests wait to change {repo_id}; try again in a few seconds")
        try:
            with anyio.fail_after(locks.LOCK_SECONDS):
                await turn.acquire()
        except TimeoutError:
            raise busy(f"{repo_id} is locked by others for {locks.LOCK_SECONDS:.0f} s; try again") from None
        try:
            return await self.retry(attempt, until)
        finally:
            turn.release()

    async def retry(self, attempt: Callable[[], Result], until: float | None = None) -> Result:
        """Run a change in a thread as soon as its locks are free; it needs no turn.

        Raises:
            Refusal: If the locks are not free in time.
        """
        until = time.monotonic() + locks.LOCK_SECONDS if until is None else until
        poll = locks.POLL_SECONDS
        while True:
            try:
                return await to_thread.run_sync(attempt, limiter=self._writers)
            except NotFree:
                if time.monotonic() > until:
                    raise
            await anyio.sleep(poll)
            poll = min(poll * 1.5, _LONGEST_POLL)


class ReadTurns:
    """Middleware that lets some reads at a time look for their answer; the others wait, first come, first served.

    The event loop gives each task a turn. With 500 reads at once, `/health` would have to wait for a part of each of
    them several times over. A read gives its place away as its answer begins: slow readers do not keep others waiting.
    """

    def __init__(self, app: ASGIApp, count: int) -> None:
        self._app = app
        self._places = anyio.Semaphore(count)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in {"GET", "HEAD"} or scope["path"] in _AT_ONCE:
            await self._app(scope, receive, send)
            return
        await self._places.acquire()
        held = True

        def leave() -> None:
            nonlocal held
            if held:
                self._places.release()
            held = False

        scope[_LEAVE] = leave

        async def leaving(message: Message) -> None:
            if message["type"] == "http.response.start":
                leave()
            await send(message)

        try:
            await self._app(scope, receive, leaving)
        finally:
            leave()


def leave_turn(scope: Scope) -> None:
    """Give a read's place away, before it waits for another server."""
    if (leave := scope.get(_LEAVE)) is not None:
        leave()
