"""Calls of a Hub: single commits, commands, incomplete and manual requests."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import requests
from starlette.types import ASGIApp, Message

from tests.support.builder_process import run_builder
from tests.support.programs import wait_for as until
from tests.support.running_hub import TOKEN, RunningHub, memory
from tests.support.small_kernel import KERNEL, commit

__all__ = ["TOKEN", "commit", "memory", "until"]
TokenHub = Callable[..., tuple[Any, ...]]


def hub_command(*arguments: str | Path, check: bool = False) -> subprocess.CompletedProcess[str]:
    """Run `kernel-builder hub` in a process of its own."""
    return run_builder(os.environ, "hub", *arguments, check=check)


def target(url: str) -> tuple[str, int]:
    """Return host and port of an address, for a socket."""
    parts = urlsplit(url)
    return str(parts.hostname), int(parts.port or 0)


def signed_address(
    hub: RunningHub, data: bytes, operation: str = "upload", *, repo_id: str = KERNEL, token: str = "any"
) -> str:
    """Return the signed address to which a client would send a large file, or from which it would load one."""
    sha256 = hashlib.sha256(data).hexdigest()
    answer = requests.post(
        f"{hub.url}/kernels/{repo_id}.git/info/lfs/objects/batch",
        json={"operation": operation, "objects": [{"oid": sha256, "size": len(data)}]},
        auth=("any", token),  # as LFS's own client sends it
        headers={"Content-Type": "application/vnd.git-lfs+json"},
    )
    return str(answer.json()["objects"][0]["actions"][operation]["href"])


def commit_body(path: str, content: str) -> str:
    """Return the body of a request that commits one small file."""
    lines = ({"key": "header", "value": {"summary": "s"}}, {"key": "file", "value": {"path": path, "content": content}})
    return "\n".join(map(json.dumps, lines))


def begin(url: str, method: str, length: int, body: bytes, token: str = "any") -> socket.socket:
    """Send the head of a request and the start of its body; without a token if `token` is empty."""
    parts = urlsplit(url)
    connection = socket.create_connection(target(url))
    sent = f"Authorization: Bearer {token}\r\n" if token else ""
    head = f"{method} {parts.path}?{parts.query} HTTP/1.1\r\nHost: {parts.netloc}\r\n{sent}"
    head += f"Content-Length: {length}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


async def ask(
    app: ASGIApp,
    path: str,
    token: str = "",
    *,
    address: str = "192.0.2.1",
    body: bytes | Sequence[tuple[float, int]] = b"",
    headers: Mapping[str, str] = {},
    read: Callable[[bytes], Awaitable[None]] | None = None,
) -> None:
    """Send a GET request, or a POST request with a body, which has to succeed or find nothing.

    Args:
        body: The whole body, or the seconds before each of its parts and their sizes, the last of which is 0.
    """
    sent = {"host": "localhost", **headers, **({"authorization": f"Bearer {token}"} if token else {})}
    scope: dict[str, Any] = {"type": "http", "method": "POST" if body else "GET", "path": path, "query_string": b""}
    parts = iter(
        [(0, body, False)] if isinstance(body, bytes) else [(wait, bytes(size), size > 0) for wait, size in body]
    )

    async def receive() -> Message:
        for wait, part, more in parts:
            await anyio.sleep(wait)
            return {"type": "http.request", "body": part, "more_body": more}
        return await anyio.sleep_forever()

    async def send(message: Message) -> None:
        assert message.get("status", 200) in {200, 404}
        if read and message.get("body"):
            await read(message["body"])

    scope["headers"] = [(name.encode(), value.encode()) for name, value in sent.items()]
    await app({**scope, "client": (address, 1)}, receive, send)
