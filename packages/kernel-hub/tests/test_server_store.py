"""Durability: no acknowledged commit is lost by a crash, by concurrent git processes, or by repairs."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests
from raw_requests import commit, hub_command

from kernel_format.errors import HubError
from kernel_hub import repair
from kernel_hub.hub_service import Hub
from kernel_hub.settings import Settings
from tests.support.running_hub import RunningHub
from tests.support.small_kernel import KERNEL, VARIANT, publish_kernel, write_kernel

pytestmark = pytest.mark.attack


def test_nothing_is_lost_beside_git_gc(hub: RunningHub) -> None:
    """Commit to two branches while git packs refs and objects; every acknowledged commit is in the history."""
    api = hub.api()
    api.create_repo(KERNEL, repo_type="kernel")
    git = ["git", "-C", str(hub.root / "repositories" / f"{KERNEL}.git")]
    acknowledged: dict[str, list[str]] = {"a": [], "b": []}
    statuses: list[int] = []
    stop = threading.Event()

    def commits(branch: str) -> None:
        url, headers = f"{hub.url}/api/kernels/{KERNEL}", {"Authorization": "Bearer any"}
        requests.post(f"{url}/branch/{branch}", json={}, headers=headers)
        while not stop.is_set():
            number = len(acknowledged[branch])
            line = {"key": "file", "value": {"path": "f", "content": f"{branch} {number}"}}
            body = '{"key": "header", "value": {"summary": "s"}}\n' + json.dumps(line)
            done = requests.post(f"{url}/commit/{branch}", data=body, headers=headers)
            statuses.append(done.status_code)
            statuses.append(requests.get(f"{url}/tree/{branch}").status_code)
            statuses.append(requests.get(f"{url}/refs").status_code)
            if done.ok:
                acknowledged[branch].append(done.json()["commitOid"])

    def packs(*command: str) -> None:
        while not stop.is_set():
            subprocess.run([*git, *command], capture_output=True, check=False)

    def repairs() -> None:
        while not stop.is_set():
            assert not list(repair.find_defects(Hub(Settings(hub.root))))

    jobs = [(commits, "a"), (commits, "b"), (packs, "pack-refs", "--all", "--prune"), (packs, "repack", "-adq")]
    with ThreadPoolExecutor(6) as at_once:
        done = [at_once.submit(*job) for job in [*jobs, (packs, "gc", "-q")]] + [at_once.submit(repairs)]
        end = time.monotonic() + 30
        time.sleep(1)
        while min(map(len, acknowledged.values())) <= 5 and time.monotonic() < end:
            time.sleep(0.1)
        stop.set()
    for job in done:
        job.result()
    assert set(statuses) == {200}
    for branch, expected in acknowledged.items():
        history = subprocess.run([*git, "rev-list", branch], capture_output=True, text=True, check=True).stdout
        assert len(expected) > 5 and set(expected) <= set(history.split())


def test_check_repairs_traces_of_crashes_and_reports_damage(hub: RunningHub, tmp_path: Path) -> None:
    publish_kernel(hub, write_kernel(tmp_path / "one"))
    repository = hub.root / "repositories" / f"{KERNEL}.git"
    (hub.root / "incoming" / "half").write_bytes(b"half")
    (repository.parent / ".new-1").mkdir()
    (repository / "objects/tmp_object_git2_a1b2c3").write_bytes(b"half")
    assert not list(repair.find_defects(Hub(Settings(hub.root))))  # too new: a server may be using them
    (repository / "refs/heads/v1.lock").touch()  # of a killed git process
    checked = Hub(Settings(hub.root))
    defects = list(repair.find_defects(checked, now=time.time() + 3600))
    assert sorted(item.where.rpartition("/")[2] for item in defects) == sorted(
        ["half", ".new-1", "tmp_object_git2_a1b2c3", "v1.lock"]
    )
    assert not list(repair.find_defects(checked, now=time.time() + 3600))

    table = next(path for path in (hub.root / "large").rglob("*") if path.is_file() and path.stat().st_size > 1000)
    with table.open("r+b") as file:
        file.write(b"damaged")
    done = hub_command("check", "--root", hub.root, "--digests")
    assert done.returncode == HubError.exit_code and "its content changed on the disk" in done.stdout
    assert requests.get(f"{hub.url}/kernels/{KERNEL}/resolve/v1/build/{VARIANT}/table.bin").status_code == 404
    publish_kernel(hub, write_kernel(tmp_path / "three"))
    commit(hub.api(), KERNEL, "again", bytes(range(256)) * 5000 + b"!", revision="v1")


def test_a_change_waits_for_the_lock_of_another_git_process(hub: RunningHub) -> None:
    """`git pack-refs` holds the lock of a ref while it deletes the loose file."""
    hub.api().create_repo(KERNEL, repo_type="kernel")
    lock = hub.root / "repositories" / f"{KERNEL}.git" / "refs/heads/main.lock"
    lock.touch()

    def commit_directly(path: str) -> requests.Response:
        lines = [{"key": "header", "value": {"summary": "s"}}, {"key": "file", "value": {"path": path, "content": "a"}}]
        body, headers = "\n".join(map(json.dumps, lines)), {"Authorization": "Bearer any"}
        return requests.post(f"{hub.url}/api/kernels/{KERNEL}/commit/main", data=body, headers=headers, timeout=40)

    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(commit_directly, "a")
        time.sleep(0.5)
        assert not waiting.done()
        lock.unlink()
        assert waiting.result().ok
    lock.touch()
    refused = commit_directly("b")
    assert refused.status_code == 503 and "locked" in refused.json()["error"] and lock.exists()
