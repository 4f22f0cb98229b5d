"""The audit log: one line of JSON for every write and every access that was denied.

A line is written before its response is sent, so that the log has every reported result. Lines have no tokens,
signatures or bodies, and the path of an address without its query.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from contextlib import suppress
from datetime import datetime, timezone
from io import TextIOWrapper
from logging.handlers import WatchedFileHandler

from starlette.types import Scope

from kernel_format.errors import ConfigError

log = logging.getLogger("kernel_hub")

_READS = {"preupload", "paths_info", "validate_yaml", "git_upload_pack"}  # routes of POST that change nothing
_LONGEST = 300  # characters of a value that the client chose


class _Lines(WatchedFileHandler):
    """Appends lines to a file of this user alone, which is opened again after another program has moved it."""

    def _open(self) -> TextIOWrapper:
        with suppress(FileExistsError):
            os.close(os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        return super()._open()

    def handleError(self, record: logging.LogRecord) -> None:
        """Warn in the server's log: the change was made."""
        log.warning("the audit log has lost a line: %s: %s", sys.exc_info()[1], record.getMessage())


def audit_logger(target: str) -> logging.Logger:
    """Return the logger that appends to a file, or writes to stdout for `-`. Servers may share the file.

    Raises:
        ConfigError: If the file cannot be opened.
    """
    try:
        handler = logging.StreamHandler(sys.stdout) if target == "-" else _Lines(target)
    except OSError as error:
        raise ConfigError(
            f"the audit log cannot be written: {error.strerror}", where=f"--audit-log {target}"
        ) from error
    logger = logging.getLogger("kernel_hub_audit")
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)
    return logger


def audit_line(scope: Scope, status: int | None) -> dict[str, object] | None:
    """Return the line for a request, or None if it could not write and was not denied.

    Handlers add details to the request's state. Without a status, the connection ended before the response.
    """
    state, parameters = scope.get("state", {}), scope.get("path_params", {})
    route = getattr(scope.get("route"), "name", None)
    denied = status in {401, 403} or state.get("hidden", False)
    read = scope["method"] in {"GET", "HEAD", "OPTIONS"} or route in {None, *_READS} or state.get("reads", False)
    if read and not denied:
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
        "what": route,
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
