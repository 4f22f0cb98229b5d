"""Permissions, crashes, and object stores."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests
from huggingface_hub import CommitOperationAdd
from raw_requests import until

from kernel_format.errors import HubError
from kernel_hub import mend
from kernel_hub.hub_service import Hub
from kernel_hub.refusals import Refusal
from kernel_hub.settings import Settings
from kernel_hub.storage import locks
from tests.support.running_hub import RunningHub
from tests.support.small_kernel import KERNEL, VARIANT, publish_kernel, send_large_file, write_kernel

# Permissions


# Crashes


def test_nothing_acknowledged_is_lost_when_the_hub_is_killed(
    start_hub: Callable[..., RunningHub], tmp_path: Path
) -> None:
    """Publish while the Hub is killed and started again; every acknowledged commit is in the history."""
    hub = start_hub()
    port = hub.url.rpartition(":")[2]
    hub.api().create_repo(KERNEL, repo_type="kernel")
    acknowledged: dict[str, bytes] = {}
    stop = threading.Event()

    def publish_until_stopped(number: int) -> None:
        step = 0
        while not stop.is_set():
            step += 1
            path, data = f"{number}-{step}.bin", os.urandom(200_000)
            try:
                send_large_file(hub.url, path, data)
                acknowledged[path] = data
            except (requests.RequestException, AssertionError):
                time.sleep(0.05)

    threads = [threading.Thread(target=publish_until_stopped, args=(number,), daemon=True) for number in range(3)]
    for thread in threads:
        thread.start()
    for kept in (4, 8, 12):
        assert until(lambda kept=kept: len(acknowledged) >= kept, 60)  # type: ignore[misc]
        time.sleep(random.uniform(0, 0.5))
        hub.send_signal(signal.SIGKILL)
        hub.wait()
        hub = start_hub("--port", port)
    stop.set()
    for thread in threads:
        thread.join()
    files = {item.path for item in hub.api().list_repo_tree(KERNEL, repo_type="kernel")}
    assert files.issuperset(acknowledged)
    for path, data in list(acknowledged.items())[-5:]:
        assert requests.get(f"{hub.url}/kernels/{KERNEL}/resolve/main/{path}").content == data
    hub.stop()
    checked = Hub(Settings(hub.root))
    defects = list(mend.find_defects(checked, digests=True, now=time.time() + 3600))
    assert all(item.mended for item in defects), defects
    assert not list(mend.find_defects(checked, digests=True, now=time.time() + 3600))
    assert not list((hub.root / "incoming").iterdir())


def leave_lock(repository: Path, ref: str) -> None:
    """Leave git's lock of a ref behind, as a killed Hub does."""
    (repository / "hub-locks/killed").touch()
    (repository / f"{ref}.lock").hardlink_to(repository / "hub-locks/killed")


def test_a_git_lock_of_another_process_is_left_alone(start_hub: Callable[..., RunningHub]) -> None:
    """`git pack-refs` holds the lock of a ref while it deletes the loose file; who takes it away loses a commit."""
    hub = start_hub()
    api = hub.api()
    api.create_repo(KERNEL, repo_type="kernel")
    lock = hub.root / "repositories" / f"{KERNEL}.git" / "refs/heads/main.lock"
    lock.touch()
    assert not list(mend.find_defects(Hub(Settings(hub.root))))
    defects = list(mend.find_defects(Hub(Settings(hub.root)), now=time.time() + 3600))
    assert [(item.where.rpartition("/")[2], item.mended) for item in defects] == [("main.lock", False)]
    body = '{"key": "header", "value": {"summary": "s"}}\n{"key": "file", "value": {"path": "a", "content": "a"}}'

    def commit() -> requests.Response:
        headers = {"Authorization": "Bearer any"}
        return requests.post(f"{hub.url}/api/kernels/{KERNEL}/commit/main", data=body, headers=headers, timeout=40)

    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(commit)
        time.sleep(0.5)
        assert lock.exists() and not waiting.done()
        lock.unlink()
        assert waiting.result().ok


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

    def mends() -> None:
        while not stop.is_set():
            assert not list(mend.find_defects(Hub(Settings(hub.root))))

    jobs = [(commits, "a"), (commits, "b"), (packs, "pack-refs", "--all", "--prune"), (packs, "repack", "-adq")]
    with ThreadPoolExecutor(6) as at_once:
        done = [at_once.submit(*job) for job in [*jobs, (packs, "gc", "-q")]] + [at_once.submit(mends)]
        end = time.monotonic() + 30
        time.sleep(3)
        while min(map(len, acknowledged.values())) <= 5 and time.monotonic() < end:
            time.sleep(0.1)
        stop.set()
    for job in done:
        job.result()
    assert set(statuses) == {200}
    for branch, expected in acknowledged.items():
        history = subprocess.run([*git, "rev-list", branch], capture_output=True, text=True, check=True).stdout
        assert len(expected) > 5 and set(expected) <= set(history.split())


def test_check_repairs_traces_of_crashes_and_reports_damage(
    hub: RunningHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = publish_kernel(hub, write_kernel(tmp_path / "one"))
    repository = hub.root / "repositories" / f"{KERNEL}.git"
    (hub.root / "incoming" / "half").write_bytes(b"half")
    (repository.parent / ".new-1").mkdir()
    (repository / "objects/tmp_object_git2_a1b2c3").write_bytes(b"half")
    leave_lock(repository, "refs/heads/v1")
    orphan = hub.root / "large" / "00" / "00" / ("0" * 64)
    orphan.parent.mkdir(parents=True)
    orphan.touch()
    # A git lock that a killed server left does not block a commit.
    assert publish_kernel(hub, write_kernel(tmp_path / "two", factor=5)) != commit
    assert not list(mend.find_defects(Hub(Settings(hub.root))))  # too new: a server may be using them
    leave_lock(repository, "refs/heads/v1")
    checked = Hub(Settings(hub.root))
    defects = list(mend.find_defects(checked, now=time.time() + 3600))
    assert sorted(item.where.rpartition("/")[2] for item in defects) == sorted(
        ["half", ".new-1", "tmp_object_git2_a1b2c3", "v1.lock", "killed", f"large file {'0' * 64}"]
    )
    assert not list(mend.find_defects(checked, now=time.time() + 3600))
    monkeypatch.setattr(locks, "LOCK_SECONDS", 0.1)
    with checked.store_lock.storing():  # a long upload
        assert ["run this again" in item.what for item in mend.find_defects(checked)] == [True]

    table = next(path for path in (hub.root / "large").rglob("*") if path.is_file() and path.stat().st_size > 1000)
    with table.open("r+b") as file:
        file.write(b"damaged")
    command = [sys.executable, "-c", "from kernel_builder.cli import main; main()", "hub", "check", "--root"]
    done = subprocess.run([*command, str(hub.root), "--digests"], capture_output=True, text=True, check=False)
    assert done.returncode == HubError.exit_code and "the disk has changed it" in done.stdout
    assert requests.get(f"{hub.url}/kernels/{KERNEL}/resolve/v1/build/{VARIANT}/table.bin").status_code == 404
    publish_kernel(hub, write_kernel(tmp_path / "three"))
    api = hub.api()
    again = [CommitOperationAdd("again", bytes(range(256)) * 5000 + b"!")]
    api.create_commit(KERNEL, again, commit_message="again", repo_type="kernel", revision="v1")


def test_waiting_for_a_lock_keeps_nobody_else_waiting(hub: RunningHub) -> None:
    """Many requests wait for one repository: others are served, the queue has a limit, and all that wait are served."""
    api = hub.api()
    for name in ("held", "free"):
        api.create_repo(f"ours/{name}", repo_type="kernel")
    body = '{"key": "header", "value": {"summary": "s"}}\n{"key": "file", "value": {"path": "a", "content": "a"}}'

    def commit(name: str) -> requests.Response:
        headers = {"Authorization": "Bearer any"}
        return requests.post(f"{hub.url}/api/kernels/ours/{name}/commit/main", data=body, headers=headers, timeout=60)

    with ThreadPoolExecutor(60) as clients:
        with locks.repository_lock(hub.root / "repositories/ours/held.git", "ours/held"):
            waiting = [clients.submit(commit, "held") for _ in range(60)]
            time.sleep(1)
            for _ in range(3):
                assert requests.get(f"{hub.url}/health", timeout=1).ok
                assert requests.get(f"{hub.url}/api/kernels/ours/held", timeout=1).ok
            assert commit("free").elapsed.total_seconds() < 1
            refused = [done.result() for done in waiting if done.done()]
            assert 20 < len(refused) < 40
            assert {(answer.status_code, answer.headers["Retry-After"]) for answer in refused} == {(503, "2")}
        assert [done.result().status_code for done in waiting].count(200) == 60 - len(refused)


def test_a_lock_file_that_was_replaced_is_not_held(tmp_path: Path) -> None:
    """Two processes must not hold one lock, each by a file of its own."""
    (repository := tmp_path / "x.git").mkdir()
    file = tmp_path / ".lock-x.git"
    opened = os.open

    def replaced(path: str | Path, *arguments: int) -> int:
        descriptor = opened(path, *arguments)
        if str(path) == str(file):
            file.rename(tmp_path / "moved")
            os.close(opened(file, os.O_CREAT))
        return descriptor

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Refusal, match="locked by others"):
        patch.setattr(os, "open", replaced)
        with locks.repository_lock(repository, "ours/x"):
            pass
    with locks.repository_lock(repository, "ours/x"):
        pass


# Stores


def test_large_files_in_an_object_store(start_hub: Callable[..., RunningHub], tmp_path: Path) -> None:
    """Two Hubs share an S3 bucket, served by moto."""
    boto = pytest.importorskip("botocore.session")
    server = pytest.importorskip("moto.server")
    endpoint = server.ThreadedMotoServer(port=0, ip_address="127.0.0.1")
    endpoint.start()
    try:
        host, port = endpoint.get_host_and_port()
        url = f"http://{host}:{port}"
        keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
        client = boto.get_session().create_client(
            "s3", endpoint_url=url, region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b"
        )
        client.create_bucket(Bucket="kernels")
        store = {**keys, "AWS_ENDPOINT_URL": url, "FSSPEC_S3_ENDPOINT_URL": url}
        hub = start_hub("--large-files", "s3://kernels/large", **store)
        other = start_hub("--large-files", "s3://kernels/large", **store)
        publish_kernel(hub, write_kernel(tmp_path / "one"))
        got = requests.get(
            f"{other.url}/kernels/{KERNEL}/resolve/v1/build/{VARIANT}/table.bin", headers={"Range": "bytes=255-257"}
        )
        assert (got.status_code, got.content) == (206, b"\xff\x00\x01")
        assert not (hub.root / "large").exists()
        listed = client.list_objects_v2(Bucket="kernels")["Contents"]
        assert any(item["Key"].startswith("large/") for item in listed)
    finally:
        endpoint.stop()
