"""Clients that send or read without end: half-open uploads, heads, connections, and readers that stall."""

from __future__ import annotations

import json
import os
import re
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import requests
from huggingface_hub import CommitOperationAdd
from raw_requests import TOKEN, begin, memory, target, until, upload_address

from tests.support.running_hub import RunningHub, running_hub
from tests.support.small_kernel import KERNEL, publish_kernel, write_kernel


@pytest.fixture
def few_files() -> Iterator[None]:
    """Start processes with the usual soft limit of 1024 open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_flood_of_half_open_uploads_does_not_block_others(
    few_files: None, start_hub: Callable[..., RunningHub]
) -> None:
    hub = start_hub("--idle-timeout", "3")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    api = hub.api()
    api.create_repo(KERNEL, repo_type="kernel")
    address = upload_address(hub, bytes(1_000_000))
    with ExitStack() as opened:
        flood = [opened.enter_context(begin(address, "PUT", 1_000_000, b"half")) for _ in range(300)]
        heads = [opened.enter_context(socket.create_connection(target(hub.url))) for _ in range(1100)]
        for connection in heads:
            connection.sendall(b"GET / HT")
        bodies = [
            opened.enter_context(begin(f"{hub.url}/api/validate-yaml", "POST", 900_000, b" " * 800_000, token=""))
            for _ in range(100)
        ]
        api.create_commit(KERNEL, [CommitOperationAdd("a", b"a")], commit_message="a", repo_type="kernel")
        statuses = []
        for connection in flood:
            connection.settimeout(20)
            statuses.append(int(connection.recv(64).split()[1]))
        assert set(statuses) == {408, 503}
        for connection in heads:
            connection.settimeout(20)
            assert connection.recv(1) == b""
        assert {int(connection.recv(64).split()[1]) for connection in bodies} == {408, 503}
    assert not list((hub.root / "incoming").iterdir())
    large = CommitOperationAdd("b.so", os.urandom(1_000_000))
    api.create_commit(KERNEL, [large], commit_message="b", repo_type="kernel")
    assert memory(hub) < 150


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningHub]:
    """A Hub with one kernel, for tests that leave it as it is."""
    directory = tmp_path_factory.mktemp("shared")
    with running_hub(directory, "--idle-timeout", "5") as hub:
        publish_kernel(hub, write_kernel(directory / "kernel"))
        yield hub


CHUNKED = b"POST /api/validate-yaml HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


FLOODS = {  # the start of a request, what follows it again and again, and the status
    "lines": (b"GET /health HTTP/1.1\r\nHost: localhost\r\n", b"X: y\r\n" * 10_000, b"431"),
    "a line": (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ", b"y" * 60_000, b"431"),
    "a name": (b"GET /health HTTP/1.1\r\nHost: localhost\r\n", b"y" * 60_000, b"431"),
    "an address": (b"GET /", b"y" * 60_000, b"414"),
    "a query": (b"GET /health?", b"y" * 60_000, b"414"),
    "trailers": (CHUNKED + b"0\r\n", b"X: y\r\n" * 10_000, b"4"),
    "a trailer": (CHUNKED + b"0\r\nX: ", b"y" * 60_000, b"4"),
    "requests": (b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 5_000, b"429"),
    "a chunk's extension": (CHUNKED + b"1;x=", b"y" * 60_000, b"4"),
}


@pytest.mark.parametrize("flood", FLOODS)
def test_endless_heads_are_refused_early(shared: RunningHub, flood: str) -> None:
    start, more, status = FLOODS[flood]
    before = memory(shared)
    sent = 0
    with socket.create_connection(target(shared.url)) as connection:
        connection.settimeout(5)
        with suppress(OSError):
            connection.sendall(start)
            while sent < 100_000_000:
                connection.sendall(more)
                sent += len(more)
        with suppress(ConnectionResetError):  # the answer is lost if the client was still sending
            assert connection.recv(100).startswith(b"HTTP/1.1 " + status)
    assert sent < 20_000_000
    assert memory(shared) - before < 10


def test_a_body_of_many_small_values_costs_little(shared: RunningHub) -> None:
    """The event loop parses it, so that everybody waits: 0.26 s for a megabyte of lists, without a token."""

    def cpu() -> float:
        fields = Path(f"/proc/{shared.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    body = b'{"content": [' + b"[]," * 340_000 + b"[]]}"
    before = cpu()
    for _ in range(5):
        answer = requests.post(
            f"{shared.url}/api/validate-yaml", data=body, headers={"Content-Type": "application/json"}
        )
        assert answer.status_code == 400
    assert cpu() - before < 0.6


def test_a_head_that_is_too_long_is_named(shared: RunningHub) -> None:
    answer = requests.get(f"{shared.url}/health", headers={f"X-{number}": "y" for number in range(101)})
    assert answer.status_code == 431 and "at most 100 lines" in answer.headers["X-Error-Message"]
    assert requests.get(f"{shared.url}/health?{'y' * 9000}").status_code == 414
    deep = requests.post(
        f"{shared.url}/api/kernels/{KERNEL}/paths-info/main",
        data=b'{"paths": ' + b"[" * 100_000,
        headers={"Content-Type": "application/json"},
    )
    assert deep.status_code == 400


def test_connections_of_one_address_are_limited(start_hub: Callable[..., RunningHub]) -> None:
    hub = start_hub("--max-connections-per-address", "20")
    with ExitStack() as opened:
        for address in ("127.0.0.1", "127.0.0.2") * 40:  # by default, the first is a proxy's
            connection = socket.create_connection(target(hub.url), source_address=(address, 0))
            opened.enter_context(connection)
        connection.settimeout(5)
        assert connection.recv(100).startswith(b"HTTP/1.1 503") and requests.get(f"{hub.url}/health").ok
    assert until(lambda: _answers(hub, "127.0.0.2"))


def _answers(hub: RunningHub, address: str) -> bool:
    with socket.create_connection(target(hub.url), source_address=(address, 0)) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        return connection.recv(100).startswith(b"HTTP/1.1 200")


def test_slow_readers_cost_little_memory_and_are_given_up(start_hub: Callable[..., RunningHub]) -> None:
    hub = start_hub("--idle-timeout", "3")
    hub.api().create_repo(KERNEL, repo_type="kernel")
    content = {"path": "large", "content": "x" * 9_000_000}
    lines = [{"key": "header", "value": {"summary": "s"}}, {"key": "file", "value": content}]
    body = "\n".join(json.dumps(line) for line in lines)
    assert requests.post(f"{hub.url}/api/kernels/{KERNEL}/commit/main", data=body, headers=TOKEN).ok
    ask = f"GET /kernels/{KERNEL}/resolve/main/large HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    with ExitStack() as opened:
        readers = []
        for _ in range(100):
            reader = opened.enter_context(socket.socket())
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.connect(target(hub.url))
            reader.sendall(ask)
            readers.append(reader)
        for reader in readers:
            assert reader.recv(100).startswith(b"HTTP/1.1 200")
        assert requests.get(f"{hub.url}/health", timeout=1).ok
        assert memory(hub) < 150

        def active() -> float:
            metric = re.search(r"hub_requests_active (\d\S*)", requests.get(f"{hub.url}/metrics").text)
            assert metric
            return float(metric[1])

        assert active() > 20
        assert until(lambda: active() == 1, 15)  # the request for the metrics
    assert requests.get(f"{hub.url}/kernels/{KERNEL}/resolve/main/large").text == content["content"]
