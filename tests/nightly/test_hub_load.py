"""Many clients at a time: commits are not refused, pages keep others served, times reveal no private repository."""

from __future__ import annotations

import http.client
import json
import random
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import requests

from kernel_hub import tokens
from tests.support.running_hub import TOKEN, RunningHub
from tests.support.small_kernel import commit

pytestmark = [pytest.mark.nightly, pytest.mark.attack, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("repositories", [1, 50])
def test_fifty_clients_commit_at_a_time(hub: RunningHub, repositories: int) -> None:
    """At most 1 % of their requests get 503."""
    for number in range(repositories):
        hub.api().create_repo(f"org/k{number}", repo_type="kernel")

    def commit_ten(client: int) -> None:
        api = hub.api()
        for number in range(10):
            content = random.randbytes(200).hex().encode()
            commit(api, f"org/k{client % repositories}", f"{client}-{number}", content)

    with ThreadPoolExecutor(50) as clients:
        list(clients.map(commit_ten, range(50)))
    statuses = [line["status"] for line in map(json.loads, hub.log.read_text().splitlines()) if "status" in line]
    assert len(statuses) >= 1000 and statuses.count(503) <= len(statuses) // 100


def test_a_flood_of_pages_keeps_no_token_waiting(hub: RunningHub) -> None:
    """48 connections without a token read the page of a commit of 25,000 files."""
    hub.api().create_repo("org/large", repo_type="kernel")
    lines: list[dict[str, object]] = [{"key": "header", "value": {"summary": "large"}}]
    lines += [{"key": "file", "value": {"path": f"{n % 100}/{n}", "content": f"{n}"}} for n in range(25_000)]
    body = "\n".join(map(json.dumps, lines))
    answer = requests.post(f"{hub.url}/api/kernels/org/large/commit/main", data=body, headers=TOKEN)
    page = f"{hub.url}/kernels/org/large/commit/{answer.json()['commitOid']}"
    stop = threading.Event()

    def flood() -> None:
        with requests.Session() as session:
            while not stop.is_set():
                assert session.get(page).ok

    waits: dict[str, list[float]] = {"/api/kernels/org/large": [], "/health": []}
    with ThreadPoolExecutor(48) as anonymous:
        jobs = [anonymous.submit(flood) for _ in range(48)]
        time.sleep(3)
        for path in [*waits] * 20:
            began = time.monotonic()
            assert requests.get(hub.url + path, headers=TOKEN).ok
            waits[path].append(time.monotonic() - began)
        stop.set()
    for job in jobs:
        job.result()
    assert all(statistics.median(times) < 2 and max(times) < 5 for times in waits.values()), waits


def test_times_do_not_reveal_private_repositories(start_hub: Callable[..., RunningHub], tmp_path: Path) -> None:
    """250 requests for each of 32 names: the order of the medians is by chance. Three times, 12 of 16 are not."""
    token = tokens.add(tmp_path / "tokens.json", "owner", read=(), write=("*",))
    hub = start_hub("--token-file", str(tmp_path / "tokens.json"))
    names = [f"k{number}" for number in random.sample(range(10**8, 10**9), 32)]
    private = names[:16]
    for name in private:
        hub.api(token).create_repo(f"org/{name}", repo_type="kernel", private=True)
    connection = http.client.HTTPConnection(urlsplit(hub.url).netloc)

    def seconds(path: str) -> float:
        began = time.perf_counter()
        connection.request("GET", path)
        connection.getresponse().read()
        return time.perf_counter() - began

    def guessed(start: str, end: str) -> int:
        times: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(250):
            for name in random.sample(names, 32):
                times[name].append(seconds(f"{start}/org/{name}{end}"))
        slowest = sorted(names, key=lambda name: statistics.median(times[name]))[16:]
        hits = len({*slowest} & {*private})
        return max(hits, 16 - hits)

    for route in (("/api/kernels", ""), ("/kernels", "/resolve/main/x")):
        assert any(guessed(*route) < 12 for _ in range(3)), route
