"""The web application: routes, error responses, log and metrics of one Hub."""

from __future__ import annotations

import errno
import json
import logging
import sqlite3
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import anyio
import pygit2
from anyio import to_thread
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kernel_format.errors import ConfigError
from kernel_hub import __version__
from kernel_hub.http.audit_log import audit_line, audit_logger
from kernel_hub.http.metrics import Metrics
from kernel_hub.http.receive import BodyLimits
from kernel_hub.http.turns import Turns
from kernel_hub.hub_service import Hub
from kernel_hub.refusals import Refusal, answer, bad_request, busy, invalid, no_route
from kernel_hub.routes import ROUTERS, pages
from kernel_hub.routes.parameters import caller_of
from kernel_hub.settings import Settings

log = logging.getLogger("kernel_hub")

_THREADS = 64
_LOOPBACK_NAMES = ["127.0.0.1", "localhost", "[::1]"]
_FULL_MESSAGES = ("No space left", "database or disk is full")  # of libgit2 and of SQLite
# What a caller may read is not for others: neither for those behind the same cache, nor after a logout.
_CACHING = ((b"cache-control", b"private, no-cache"), (b"vary", b"Authorization, Cookie"))
_OUT_OF_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def create_app(settings: Settings) -> FastAPI:
    """Create the application that serves one Hub."""
    app = FastAPI(
        lifespan=_lifespan,
        title="A Hub for kernels",
        version=__version__,
        description="The part of the Hub's API that `huggingface_hub` and `kernels` use for kernels.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses={"4XX": {"description": "A refusal; `X-Error-Code` and `X-Error-Message` give the reason"}},
    )
    hub = Hub(settings)
    app.state.hub = hub
    app.state.metrics = Metrics(hub.root, hub.index.stored_bytes, settings.quota_bytes)
    app.state.turns = {"quick": Turns(_THREADS, 8), "write": Turns(32, 4), "long": Turns(4, 1)}
    app.state.turns |= {"clone": Turns(16, 2), "refs": Turns(8, 2)}  # processes of git
    app.state.token_threads = anyio.CapacityLimiter(8)  # every request needs one first, and none waits for a lock
    observers = anyio.CapacityLimiter(2)  # not the threads of other requests, which may all be busy

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Check that this server can read its root, tokens and index."""
        await to_thread.run_sync(hub.check, limiter=observers)
        return {"status": "ok", "version": __version__}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Return this server's metrics."""
        text = await to_thread.run_sync(app.state.metrics.text, limiter=observers)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    for router in ROUTERS:  # after the routes above, whose addresses could be an organization's
        app.include_router(router)
    app.add_exception_handler(HTTPException, _refuse)
    app.add_exception_handler(RequestValidationError, _refuse)
    app.add_exception_handler(ClientDisconnect, _gone)
    for failure in (OSError, pygit2.GitError, sqlite3.Error, ConfigError, Exception):
        app.add_exception_handler(failure, _fail)
    app.add_middleware(BodyLimits, limits=settings.limits, identify=partial(caller_of, hub=hub))
    if settings.token_file is None:
        # Any token may write. A web page whose host name resolves to loopback must not reach the Hub through a browser.
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=_LOOPBACK_NAMES)
    audit = None if settings.audit_log is None else audit_logger(settings.audit_log)
    app.add_middleware(RequestObserver, metrics=app.state.metrics, audit=audit)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    to_thread.current_default_thread_limiter().total_tokens = _THREADS
    yield


async def _refuse(request: Request, error: Exception) -> Response:
    if type(error) is HTTPException and error.status_code in {404, 405}:  # no route, or none for this method
        error = no_route(request.method, request.url.path)
    elif isinstance(error, RequestValidationError):
        error = invalid(error)
    if isinstance(error, Refusal):
        request.state.reason = error.message
        request.state.hidden = error.hidden
        if request.headers.get("user-agent", "").startswith("git/"):  # it shows plain text only
            return PlainTextResponse(f"{error.message}\n", error.status_code, error.headers)
        wants_html = "text/html" in request.headers.get("accept", "")
        return pages.refusal_page(request, error) if wants_html else answer(error)
    assert isinstance(error, HTTPException)
    return answer(Refusal(error.status_code, str(error.detail), code="Http", headers=dict(error.headers or {})))


async def _gone(request: Request, error: Exception) -> Response:
    return answer(bad_request("the connection was closed before the end of the body"))  # for the log only


async def _fail(request: Request, error: Exception) -> Response:
    full = isinstance(error, OSError) and error.errno in _OUT_OF_SPACE
    if full or any(message in str(error) for message in _FULL_MESSAGES):
        return answer(Refusal(507, "the Hub has no space left; nothing was stored", code="InsufficientStorage"))
    if isinstance(error, sqlite3.OperationalError) and "locked" in str(error):
        return answer(busy("the index is locked by other processes; try again"))
    if isinstance(error, (ConfigError, sqlite3.DatabaseError)):
        log.error("the token file or the index is damaged: %s", error)
        return answer(busy("this Hub cannot read its token file or index, which its operator has to repair"))
    log.error("request failed", extra={"fields": {"path": request.url.path}}, exc_info=error)
    return answer(Refusal(500, "the Hub failed; its log has the reason", code="InternalError"))


class RequestObserver:
    """Middleware that gives each request an id, a line in the log and the audit log, and an entry in the metrics.

    It ends a response if its token ends.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, audit: logging.Logger | None) -> None:
        self._app = app
        self._metrics = metrics
        self._audit = audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        request_id = uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        status: int | None = None

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._write_audit(scope, status)
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode()), *_CACHING]
            elif message.get("more_body") and (key := scope["state"].get("key")):
                state = scope["app"].state
                await to_thread.run_sync(state.hub.tokens.caller_by_key, key, limiter=state.token_threads)
            await send(message)

        self._metrics.active.inc()
        try:
            await self._app(scope, receive, noted)
        finally:
            if status is None:
                self._write_audit(scope, None)
            self._metrics.active.dec()
            seconds = time.perf_counter() - began
            route = getattr(scope.get("route"), "path", "none")
            self._metrics.request_ended(scope["method"], route, status or 500, seconds)
            fields = {
                "id": request_id,
                "method": scope["method"][:32],
                "path": scope["path"],
                "status": status or 500,
                "ms": round(seconds * 1000, 1),
                "caller": scope["state"].get("caller") or None,
                "client": (scope.get("client") or (None,))[0],
            }
            log.info("request", extra={"fields": fields})

    def _write_audit(self, scope: Scope, status: int | None) -> None:
        if self._audit is not None and (line := audit_line(scope, status)) is not None:
            self._audit.info(json.dumps(line))
