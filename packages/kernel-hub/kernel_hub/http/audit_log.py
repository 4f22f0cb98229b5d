"""The audit log: one line of JSON for every write and every access that was denied.

A line is written before its response is sent, so that the log has every reported result. Lines have no tokens,
signatures or bodies, and the path of an address without its query.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from datetime import datetime, timezone
from pathlib import Path

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kernel_format.errors import ConfigError

log = logging.getLogger("kernel_hub")

# Requests with another method than GET that change nothing.
_READS = re.compile(r".*/(preupload|paths-info)/|/api/validate-yaml$|/v1/telemetry$|.*/git-upload-pack$")
_LONGEST = 300  # characters of a value that the client chose


class AuditFile:
    """The file of an audit log, or stdout for `-`. Servers and `logrotate` may share it.

    Raises:
        ConfigError: If it cannot be opened.
    """

    def __init__(self, target: str) -> None:
        self._path = None if target == "-" else Path(target)
        self._descriptor = 1 if self._path is None else self._opened()

    def _opened(self) -> int:
        assert self._path is not None
        try:
            return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
        except OSError as error:
            raise ConfigError(
                f"the audit log cannot be written: {error.strerror}", where=f"--audit-log {self._path}"
            ) from error

    def reopen(self) -> None:
        """Open the path again, after another program has moved the file."""
        if self._path is None:
            return
        try:
            opened = self._opened()
        except ConfigError as error:  # continue in the old file
            log.warning("%s", error)
            return
        os.dup2(opened, self._descriptor, inheritable=False)  # the same descriptor, which a writer may be using
        os.close(opened)

    def write(self, line: dict[str, object]) -> None:
        """Append a line. A failure is a warning in the server's log: the change was made."""
        data = json.dumps(line, ensure_ascii=True).encode() + b"\n"
        try:
            written = os.write(self._descriptor, data)
            if written < len(data):
                raise OSError(f"{written} of {len(data)} bytes were written")
        except OSError as error:
            log.warning("the audit log has lost a line: %s: %s", error, data.decode().strip())


class Audit:
    """Middleware that writes the audit log. Handlers add details to the request's state."""

    def __init__(self, app: ASGIApp, file: AuditFile) -> None:
        self._app = app
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        done = False

        def audit(status: int | None) -> None:
            nonlocal done
            if not done and (line := _line(scope, status)) is not None:
                self._file.write(line)
            done = True

        async def audited(message: Message) -> None:
            if message["type"] == "http.response.start":
                audit(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, audited)
        finally:
            audit(None)  # if no response was begun


def _line(scope: Scope, status: int | None) -> dict[str, object] | None:
    """Return the line for a request, or None if it could not write and was not denied."""
    state, parameters = scope.get("state", {}), scope.get("path_params", {})
    denied = status in {401, 403} or state.get("hidden", False)
    read = scope["method"] in {"GET", "HEAD", "OPTIONS"} or _READS.match(scope["path"]) or state.get("reads", False)
    if (read or "route" not in scope) and not denied:
        return None
    repository = state.get("repository")
    if repository is None and {"organization", "name"} <= parameters.keys():
        repository = f"{parameters['organization']}/{parameters['name']}"
    result = "denied" if denied else "unknown" if status is None else "done" if status < 400 else "refused"
    values = {
        "time": datetime.fromtimestamp(time.time(), timezone.utc).isoformat(timespec="milliseconds"),
        "who": state.get("caller") or None,
        "address": (scope.get("client") or (None,))[0],
        "method": scope["method"],
        "path": scope["path"],
        "what": getattr(scope.get("route"), "name", None),
        "repository": repository,
        "revision": parameters.get("revision") or state.get("revision"),
        "commit": state.get("commit"),
        "result": result,
        "status": status,
        "reason": state.get("reason"),
        "id": state.get("request_id"),
    }
    return {
        key: value[:_LONGEST] if isinstance(value, str) else value for key, value in values.items() if value is not None
    } | {"who": values["who"]}
