"""Random requests to every route of the Hub server, and a huge file: no error, and no growing memory."""

from __future__ import annotations

import hashlib
import os
import random
import re
import socket
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings, strategies

from tests.nightly.conftest import SECONDS
from tests.support.running_hub import TOKEN, RunningHub, memory
from tests.support.small_kernel import KERNEL, publish_kernel, write_kernel

pytestmark = [pytest.mark.attack, pytest.mark.nightly, pytest.mark.timeout(1800)]

ORGANIZATION, NAME = KERNEL.split("/")
EXISTING = {"organization": ORGANIZATION, "name": NAME, "revision": "main"}
ODD = ["%00", "%ED%A0%80", "%2e%2e", "%252e", "%0d%0aX:1", "%F0%9F%92%A9", "a" * 4000, "-1", "1e400", "~", "*", "%7F"]
QUERIES = ["", "?cursor=%00", "?cursor=-1", "?expand=1&recursive=1", "?p=1000000", "?%00"]
METHODS = ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"]
BODIES = [b"", b"{}", b"[" * 5000, b"\xff" * 300, b'{"name": "\\ud800"}', b"\n" * 50]
HEADERS = ["", "Range: bytes=5-1\r\n", "Range: bytes=-0\r\n", "Content-Encoding: gzip\r\n", "If-Range: x\r\n"]
GIT_LINES = [
    *(b"command=fetch", b"command=ls-refs", b"command=object-info", b"command=x", b"object-format=sha256", b"0000"),
    *(b"want " + b"1" * 40, b"want-ref refs/heads/main", b"have " + b"0" * 40, b"shallow " + b"1" * 40, b"0001"),
    *(b"deepen -1", b"deepen 99999999999", b"deepen-since 1e9", b"filter sparse:oid=x", b"filter tree:99999", b"0002"),
    *(b"ref-prefix " + b"a" * 900, b"oid " + b"1" * 40, b"done", b"packfile-uris x", b"x" * 60_000, b"0003"),
]
ERROR = re.compile(r'Traceback \(most recent|"level": "(error|critical|warning)"')


@schemathesis.serializer("application/x-ndjson")
def commit_lines(context: object, value: object) -> bytes:
    """Serialize a generated value as the lines of a commit, which may be malformed."""
    return f'{{"key": "header", "value": {{"summary": "s"}}}}\n{value}'.encode("utf-8", "surrogatepass")


class Statuses(Counter[int]):
    """How often the server sent each status, and the requests that it failed to handle."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[str] = []

    def add(self, status: int, request: str) -> None:
        self[status] += 1
        if status in {500, 502, 504}:
            self.faults.append(f"{status} {request}"[:300])


def send_described(hub: RunningHub, operation: Any, statuses: Statuses) -> None:
    """Send requests that schemathesis generates for an operation of the OpenAPI description."""

    @given(case=operation.as_strategy(), exists=strategies.booleans())
    @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    def send(case: Any, exists: bool) -> None:
        if exists:
            case.path_parameters.update({key: EXISTING[key] for key in EXISTING.keys() & case.path_parameters.keys()})
        try:
            response = case.call(headers=TOKEN, timeout=60)
        except (requests.RequestException, UnicodeError, ValueError):
            return  # the client cannot send it, or the server has closed the connection
        statuses.add(response.status_code, case.as_curl_command())

    send()


def send_malformed(hub: RunningHub, path: str, statuses: Statuses) -> None:
    """Send a request that no library would send."""
    path = re.sub(
        r"\{(\w+)(:path)?\}",
        lambda parameter: EXISTING.get(parameter[1], "x") if random.random() < 0.6 else random.choice(ODD),
        path,
    )
    body = random.choice(BODIES)
    head = (
        f"{random.choice(METHODS)} {path}{random.choice(QUERIES)} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"Authorization: Bearer any\r\nConnection: close\r\n{random.choice(HEADERS)}Content-Length: {len(body)}\r\n\r\n"
    )
    address = urlsplit(hub.url)
    try:
        with socket.create_connection((str(address.hostname), int(address.port or 0)), timeout=60) as connection:
            connection.sendall(head.encode("latin-1") + body)
            response = connection.recv(100)
    except ConnectionError:  # the server refuses the rest of the body
        return
    if response:
        statuses.add(int(response.split()[1]), head[:200])


def send_git_lines(hub: RunningHub, statuses: Statuses) -> None:
    """Send lines of git's protocol in any order; half of the requests are damaged."""
    lines = random.choices(GIT_LINES, k=random.randrange(1, 8))
    body = b"".join(line if len(line) == 4 else b"%04x%s" % (len(line) + 4, line) for line in lines) + b"0000"
    if random.random() < 0.5:
        start = random.randrange(len(body))
        body = body[:start] + random.choice([os.urandom(3), b"ffff", b"\0", b""]) + body[start + 2 :]
    headers = {
        **TOKEN,
        "Content-Type": "application/x-git-upload-pack-request",
        "Git-Protocol": random.choice(["version=2", "version=1", "version=0", ":"]),
    }
    response = requests.post(f"{hub.url}/kernels/{KERNEL}/git-upload-pack", data=body, headers=headers, timeout=60)
    statuses.add(response.status_code, f"git {body[:100]!r}")


def test_random_requests_find_no_server_error(start_hub: Callable[..., RunningHub], tmp_path: Path) -> None:
    hub = start_hub()
    kernel = write_kernel(tmp_path / "kernel")
    operations = [
        result.ok()  # type: ignore[union-attr]
        for result in schemathesis.openapi.from_url(f"{hub.url}/openapi.json").get_all_operations()
    ]
    statuses, resident = Statuses(), 0
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        publish_kernel(hub, kernel)  # a request may have deleted it
        for operation in operations:
            send_described(hub, operation, statuses)
            for _ in range(10):
                send_malformed(hub, random.choice(operations).path, statuses)
            for _ in range(3):
                send_git_lines(hub, statuses)
        # After the first round the server has imported all modules and filled its caches.
        resident = resident or psutil.Process(hub.process.pid).memory_info().rss
    assert not statuses.faults
    assert statuses.keys() >= {200, 400, 404}
    assert not [line[:2000] for line in hub.log.read_text().splitlines() if ERROR.search(line)]
    assert psutil.Process(hub.process.pid).memory_info().rss <= 1.5 * resident
    assert requests.get(f"{hub.url}/health", timeout=10).ok


HUGE_FILE = 2_000_000_000  # bytes
MOST_MEMORY = 150  # MB


def test_a_huge_file_does_not_fill_the_servers_memory(
    hub: RunningHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)  # as docs/hub.md says for such files
    file = tmp_path / "kernel/huge.so"
    file.parent.mkdir()
    digest = hashlib.sha256()
    with file.open("wb") as stream:
        for _ in range(HUGE_FILE // 10_000_000):
            block = os.urandom(10_000_000)
            digest.update(block)
            stream.write(block)
    publish_kernel(hub, file.parent)
    received = hashlib.sha256()
    with requests.get(f"{hub.url}/kernels/{KERNEL}/resolve/v1/huge.so", stream=True, timeout=60) as response:
        for block in response.iter_content(1 << 20):
            received.update(block)
    assert received.hexdigest() == digest.hexdigest()
    assert memory(hub) <= MOST_MEMORY
