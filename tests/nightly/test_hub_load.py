"""One Hub server process under load: many clients at the same time, and the memory that a huge file takes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import requests

from tests.support.running_hub import RunningHub
from tests.support.small_kernel import KERNEL, publish_kernel, write_kernel

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

CLIENTS = 64
HUGE_FILE = 2_000_000_000  # bytes
MOST_MEMORY = 150_000_000  # bytes


# Imports once, then forks the clients: each has an empty cache. Prints the errors as JSON.
LOAD = """
import json, multiprocessing, sys
import kernels, torch
from huggingface_hub import constants

def load(number):
    constants.HF_HUB_CACHE = f"{sys.argv[2]}/cache-{number}"
    barrier.wait(60)
    try:
        kernels.get_kernel(sys.argv[3], version=1)
    except Exception as error:
        results.put(repr(error))
    else:
        results.put(None)

fork = multiprocessing.get_context("fork")
barrier, results = fork.Barrier(int(sys.argv[1])), fork.SimpleQueue()
clients = [fork.Process(target=load, args=(number,)) for number in range(int(sys.argv[1]))]
for client in clients:
    client.start()
print(json.dumps([error for error in (results.get() for _ in clients) if error]))
"""


def test_many_clients_load_a_kernel_at_the_same_time(hub: RunningHub, tmp_path: Path) -> None:
    publish_kernel(hub, write_kernel(tmp_path / "kernel"))
    command = [sys.executable, "-c", LOAD, str(CLIENTS), str(tmp_path), KERNEL]
    done = subprocess.run(command, env=hub.environment, stdout=subprocess.PIPE, text=True, check=True, timeout=600)
    assert json.loads(done.stdout) == []


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
