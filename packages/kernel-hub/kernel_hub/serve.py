"""Running a Hub: its socket, its log and its server process."""

from __future__ import annotations

import gc
import ipaddress
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from types import FrameType

import structlog
import uvicorn

from kernel_format.errors import ConfigError, HubError
from kernel_hub.app import create_app
from kernel_hub.git.command import end_children
from kernel_hub.http.connections import limited, raise_file_limit, return_memory
from kernel_hub.settings import Settings

GRACE_SECONDS = 3  # in which requests may end after a signal
LAST_SECONDS = 4.5


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server that listens on this host."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket; port 0 chooses a free port.

    Raises:
        HubError: If the address cannot be used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(2048)
    except OSError as error:
        raise HubError(
            f"cannot listen on this address: {error.strerror or error}",
            where=f"--host {host} --port {port}",
            hint="--port 0 chooses a free port",
        ) from error
    return listening


def set_up_logs(level: str) -> None:
    """Log to stderr: one JSON object per line, or coloured text on a terminal."""
    times: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    # Clients choose the paths. On a terminal they are quoted, since they may hold escape sequences.
    shown = (
        structlog.dev.ConsoleRenderer(repr_native_str=True)
        if sys.stderr.isatty()
        else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *times,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=times,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, shown],
        )
    )
    logging.captureWarnings(True)
    for name in ("kernel_hub", "uvicorn", "py.warnings"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level.upper() if name == "kernel_hub" else logging.WARNING)


class _Server(uvicorn.Server):
    """A server that a signal ends in time, whatever its requests do: what was acknowledged is on the disk."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        last = threading.Timer(LAST_SECONDS, _end, (128 + sig,))
        last.daemon = True
        last.start()


def _end(status: int) -> None:
    """End this process, whatever its threads wait for; git would go on for as long as its limits let it."""
    end_children()
    os._exit(status)


def serve(settings: Settings, *, host: str, port: int, log_level: str, ready: Callable[[str], None]) -> None:
    """Serve a Hub until a signal ends it.

    Args:
        settings: What to serve, and to whom.
        host: The host name or address to listen on.
        port: The port; 0 chooses a free one.
        log_level: The lowest level that is logged.
        ready: Called with the Hub's address as soon as it listens.

    Raises:
        ConfigError: If other machines could reach it, and there are no tokens; or the audit log cannot be written.
        HubError: If it cannot listen on this address.
    """
    if settings.token_file is None and not is_loopback(host):
        raise ConfigError(
            "without tokens anyone who can reach this address could publish, so only loopback is allowed",
            where=f"--host {host}",
            hint="kernel-builder hub token add NAME --write ORG --token-file F, then serve with --token-file F",
        )
    set_up_logs(log_level)
    return_memory()
    # Half of the open files are for what the requests read and write.
    most = min(settings.connections.connections, raise_file_limit() // 2)
    connections = replace(settings.connections, connections=most)
    app = create_app(settings)
    # A body of a megabyte can have 300,000 lists. For those, the collector looked at all objects again and again.
    gc.freeze()
    if settings.audit_log is not None:
        signal.signal(signal.SIGHUP, lambda *_: app.state.audit_file.reopen())
    with listen(host, port) as listening:
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            loop="asyncio",  # uvloop accepts one connection a turn: with 500 at once, `/health` waits for 500 turns
            http=limited(connections, settings.limits.idle_seconds),
            timeout_keep_alive=30,
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
        name = f"[{host}]" if ":" in host else host
        ready(f"http://{name}:{listening.getsockname()[1]}")
        _Server(config).run(sockets=[listening])
