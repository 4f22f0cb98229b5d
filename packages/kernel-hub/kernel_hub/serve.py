"""Running a Hub: its socket, its log and its server process."""

from __future__ import annotations

import ipaddress
import json
import logging
import resource
import socket
import sys
from collections.abc import Callable
from datetime import datetime, timezone

import uvicorn

from kernel_format.errors import ConfigError, HubError
from kernel_hub.app import create_app
from kernel_hub.hub_service import Hub
from kernel_hub.settings import Settings

GRACE_SECONDS = 3  # in which requests may end after a signal
CONNECTIONS = 1000
HEAD_BYTES = 32 << 10


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
        listening = socket.socket(family, kind, protocol)  # with its number, asyncio sets TCP_NODELAY: 1 ms, not 44
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(2048)
        return listening
    except OSError as error:
        raise HubError(
            f"cannot listen on this address: {error.strerror or error}",
            where=f"--host {host} --port {port}",
            hint="--port 0 chooses a free port",
        ) from error


class _JsonLines(logging.Formatter):
    """One JSON object per line. A record's `fields` are added to it; escape sequences that clients send are quoted."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            **getattr(record, "fields", {}),
            "event": record.getMessage(),
            "level": record.levelname.lower(),
            "timestamp": datetime.fromtimestamp(record.created, timezone.utc).isoformat(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def set_up_logs() -> None:
    """Log to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines())
    logging.captureWarnings(True)
    for name in ("kernel_hub", "uvicorn", "py.warnings"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel("INFO" if name == "kernel_hub" else logging.WARNING)


def serve(settings: Settings, *, host: str, port: int, ready: Callable[[str], None]) -> None:
    """Serve a Hub until a signal ends it. `ready` is called with its address as soon as it listens.

    Raises:
        ConfigError: If other machines could reach it, and there are no tokens; or the audit log cannot be written.
        HubError: If it cannot listen on this address.
    """
    if settings.token_file is None and not is_loopback(host):
        raise ConfigError(
            "without tokens anyone who can reach this address could publish, so only loopback is allowed",
            where=f"--host {host}",
            hint="kernel-hub token add NAME --write ORG --token-file F, then serve with --token-file F",
        )
    set_up_logs()
    sys.setswitchinterval(0.001)  # for which a request waits, often, while another computes
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    app = create_app(settings)
    hub: Hub = app.state.hub
    hub.index.read_all(hub.repositories)
    with listen(host, port) as listening:
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            http="h11",  # limits the head of a request, unlike httptools
            h11_max_incomplete_event_size=HEAD_BYTES,
            limit_concurrency=min(CONNECTIONS, most_files // 2),  # requests read and write files, too
            timeout_keep_alive=30,
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
        name = f"[{host}]" if ":" in host else host
        ready(f"http://{name}:{listening.getsockname()[1]}")
        uvicorn.Server(config).run(sockets=[listening])
