"""A full disk: every write is refused with the reason, and none is half done."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import requests

from kernel_hub import repair
from kernel_hub.hub_service import Hub
from kernel_hub.settings import Settings
from tests.support.running_hub import RunningHub
from tests.support.small_kernel import KERNEL

pytestmark = pytest.mark.attack


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("a small disk can be mounted by root only")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


@pytest.fixture
def filled(small_disk: Path) -> Callable[[], None]:
    """A function that fills the small disk to the last byte."""

    def fill() -> None:
        with (small_disk / "filling").open("ab", buffering=0) as file:
            for size in (4096, 1):
                with suppress(OSError):
                    while file.write(bytes(size)):
                        pass

    return fill


def test_every_change_on_a_full_disk_is_refused_with_the_reason(
    start_hub: Callable[..., RunningHub], small_disk: Path, filled: Callable[[], None]
) -> None:
    hub = start_hub(root=small_disk / "hub")
    headers = {"Authorization": "Bearer any"}
    api = f"{hub.url}/api/kernels/{KERNEL}"
    hub.api().create_repo(KERNEL, repo_type="kernel")
    hub.api().create_repo("o/spare", repo_type="kernel")
    sha256 = hashlib.sha256(large := os.urandom(500_000)).hexdigest()
    batch = {"operation": "upload", "objects": [{"oid": sha256, "size": len(large)}]}
    uploads = requests.post(f"{hub.url}/kernels/{KERNEL}.git/info/lfs/objects/batch", json=batch, headers=headers)
    address = uploads.json()["objects"][0]["actions"]["upload"]["href"]
    commit = '{"key": "header", "value": {"summary": "s"}}\n{"key": "file", "value": {"path": "a", "content": "a"}}'
    changes: list[tuple[str, str, dict[str, Any]]] = [
        ("POST", f"{api}/commit/main", {"data": commit}),
        ("POST", f"{api}/branch/v1", {"json": {}}),
        ("POST", f"{api}/tag/main", {"json": {"tag": "t", "message": "m"}}),
        ("PUT", f"{api}/settings", {"json": {"private": False}}),
        ("POST", f"{hub.url}/api/repos/create", {"json": {"name": "b", "organization": "o", "type": "kernel"}}),
        ("PUT", address, {"data": large}),
    ]
    filled()
    for _ in range(2):
        for method, url, options in changes:
            answer = requests.request(method, url, **{"headers": headers, **options})
            assert answer.status_code == 507, (url, answer.text)
        assert requests.get(api).ok and requests.get(f"{hub.url}/").ok and requests.get(f"{hub.url}/health").ok
    assert requests.get(f"{hub.url}/api/kernels").ok
    assert not list(repair.find_defects(Hub(Settings(hub.root))))
    hub.api().delete_repo("o/spare", repo_type="kernel")
    assert [item["id"] for item in requests.get(f"{hub.url}/api/kernels").json()] == [KERNEL]
    filled()
    assert requests.post(f"{api}/commit/main", data=commit, headers=headers).status_code == 507
    (small_disk / "filling").unlink()
    for method, url, options in changes:
        assert requests.request(method, url, **{"headers": headers, **options}).ok, url
