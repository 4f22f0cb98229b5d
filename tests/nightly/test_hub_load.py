"""One Hub server process under load: many clients at the same time, and the memory that a huge file takes."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import re
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.support.running_hub import RunningHub
from tests.support.small_kernel import KERNEL, publish_kernel, write_kernel

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

CLIENTS = 64
HUGE_FILE = 2_000_000_000  # bytes
MOST_MEMORY = 150_000_000  # bytes


def load_kernel(cache: Path, barrier: Any, results: Any) -> None:
    """Load the kernel with an empty cache, and put the error or an empty string into the queue."""
    import kernels
    from huggingface_hub import constants

    constants.HF_HUB_CACHE = str(cache)
    barrier.wait()
    try:
        kernels.get_kernel(KERNEL, version=1)
        results.put("")
    except Exception as error:
        results.put(repr(error))


def test_many_clients_load_a_kernel_at_the_same_time(
    hub: RunningHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_kernel(hub, write_kernel(tmp_path / "kernel"))
    for name, value in hub.environment.items():
        monkeypatch.setenv(name, value)
    spawn = multiprocessing.get_context("forkserver")
    spawn.set_forkserver_preload(["kernels", "torch"])
    barrier, results = spawn.Barrier(CLIENTS), spawn.SimpleQueue()
    clients = [
        spawn.Process(target=load_kernel, args=(tmp_path / f"cache-{number}", barrier, results))
        for number in range(CLIENTS)
    ]
    for client in clients:
        client.start()
    assert [error for error in (results.get() for _ in clients) if error] == []
    for client in clients:
        client.join()


def peak_memory(hub: RunningHub) -> int:
    """Return the largest resident memory of the server since its start, in bytes."""
    peak = re.search(r"VmHWM:\s*(\d+) kB", Path(f"/proc/{hub.process.pid}/status").read_text())
    assert peak
    return int(peak[1]) * 1024


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
    assert peak_memory(hub) <= MOST_MEMORY
