"""The memory that a huge file takes in a Hub server process."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

import pytest
import requests

from tests.support.running_hub import RunningHub
from tests.support.small_kernel import KERNEL, publish_kernel

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

HUGE_FILE = 2_000_000_000  # bytes
MOST_MEMORY = 150_000_000  # bytes


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
