"""Permissions, crashes, full disks, and object stores."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import requests
from huggingface_hub import CommitOperationAdd
from huggingface_hub.errors import HfHubHTTPError

from kernel_builder.errors import HubError
from kernel_builder.server import locks, mend
from kernel_builder.server.hub_service import Hub
from kernel_builder.server.refusals import Refusal
from kernel_builder.server.settings import Settings
from tests.hub.conftest import RunningHub
from tests.hub.kernel import KERNEL, VARIANT, publish_kernel, write_kernel

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
                _send(hub.url, path, data)
                acknowledged[path] = data
            except (requests.RequestException, AssertionError):
                time.sleep(0.05)

    threads = [threading.Thread(target=publish_until_stopped, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        time.sleep(random.uniform(0.2, 0.8))
        hub.process.send_signal(signal.SIGKILL)
        hub.process.wait()
        hub = start_hub("--port", port)
    stop.set()
    for thread in threads:
        thread.join()
    assert len(acknowledged) > 10
    files = {item.path for item in hub.api().list_repo_tree(KERNEL, repo_type="kernel")}
    assert files.issuperset(acknowledged)
    for path, data in list(acknowledged.items())[-5:]:
        assert requests.get(f"{hub.url}/kernels/{KERNEL}/resolve/main/{path}").content == data
    hub.stop()
    checked = Hub(Settings(hub.root))
    found = list(mend.find_defects(checked, digests=True, now=time.time() + 3600))
    assert all(item.mended for item in found), found
    assert not list(mend.find_defects(checked, digests=True, now=time.time() + 3600))
    assert not list((hub.root / "incoming").iterdir())


def _send(url: str, path: str, data: bytes) -> None:
    """Publish one large file as the client does, but without retries."""
    sha256 = hashlib.sha256(data).hexdigest()
    headers = {"Authorization": "Bearer any"}
    batch = requests.post(
        f"{url}/kernels/{KERNEL}.git/info/lfs/objects/batch",
        json={"operation": "upload", "objects": [{"oid": sha256, "size": len(data)}]},
        headers=headers,
        timeout=10,
    )
    batch.raise_for_status()
    requests.put(batch.json()["objects"][0]["actions"]["upload"]["href"], data=data, timeout=10).raise_for_status()
    lines = [
        {"key": "header", "value": {"summary": path}},
        {"key": "lfsFile", "value": {"path": path, "algo": "sha256", "oid": sha256, "size": len(data)}},
    ]
    body = "".join(json.dumps(line) + "\n" for line in lines)
    requests.post(f"{url}/api/kernels/{KERNEL}/commit/main", data=body, headers=headers, timeout=10).raise_for_status()


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
    found = list(mend.find_defects(Hub(Settings(hub.root)), now=time.time() + 3600))
    assert [(item.where.rpartition("/")[2], item.mended) for item in found] == [("main.lock", False)]
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
        until = time.monotonic() + 30
        time.sleep(3)
        while min(map(len, acknowledged.values())) <= 5 and time.monotonic() < until:
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
    found = list(mend.find_defects(checked, now=time.time() + 3600))
    assert sorted(item.where.rpartition("/")[2] for item in found) == sorted(
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


def test_a_full_disk_is_a_clear_error_and_the_hub_keeps_running(
    start_hub: Callable[..., RunningHub], small_disk: Path, tmp_path: Path
) -> None:
    hub = start_hub(root=small_disk / "hub")
    api = hub.api()
    api.create_repo(KERNEL, repo_type="kernel")
    large = os.urandom(6_000_000)
    with pytest.raises(HfHubHTTPError, match="no space left"):
        api.create_commit(KERNEL, [CommitOperationAdd("x.so", large)], commit_message="large", repo_type="kernel")
    with pytest.raises(requests.HTTPError, match="507"):  # the client has not announced the size
        _send(hub.url, "x.so", large)
    assert not list((hub.root / "incoming").iterdir())
    api.create_commit(KERNEL, [CommitOperationAdd("small", b"fits")], commit_message="fits", repo_type="kernel")


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
    granted = requests.get(f"{api}/xet-write-token/main", headers=headers).json()
    xet = {"Authorization": f"Bearer {granted['accessToken']}"}
    commit = '{"key": "header", "value": {"summary": "s"}}\n{"key": "file", "value": {"path": "a", "content": "a"}}'
    changes: list[tuple[str, str, dict[str, Any]]] = [
        ("POST", f"{api}/commit/main", {"data": commit}),
        ("POST", f"{api}/branch/v1", {"json": {}}),
        ("POST", f"{api}/tag/main", {"json": {"tag": "t", "message": "m"}}),
        ("PUT", f"{api}/settings", {"json": {"private": False}}),
        ("POST", f"{hub.url}/api/repos/create", {"json": {"name": "b", "organization": "o", "type": "kernel"}}),
        ("PUT", address, {"data": large}),
        ("POST", f"{granted['casUrl']}/v1/xorbs/default/{'1' * 64}", {"data": large, "headers": xet}),
    ]
    filled()
    for _ in range(2):
        for method, url, options in changes:
            answer = requests.request(method, url, **{"headers": headers, **options})
            assert answer.status_code == (413 if "/xet/" in url else 507), (url, answer.text)
        assert requests.get(api).ok and requests.get(f"{hub.url}/").ok and requests.get(f"{hub.url}/health").ok
    with closing(sqlite3.connect(hub.root / "index.sqlite")) as database, database:  # of a server that was killed
        (small_disk / "filling").unlink()
        database.execute("INSERT INTO marks (repo_id, began, since) VALUES (?, ?, ?)", (KERNEL, 0, 0))
    filled()
    assert requests.get(f"{hub.url}/api/kernels").ok
    assert not list(mend.find_defects(Hub(Settings(hub.root))))
    hub.api().delete_repo("o/spare", repo_type="kernel")
    assert [item["id"] for item in requests.get(f"{hub.url}/api/kernels").json()] == [KERNEL]
    filled()
    assert requests.post(f"{api}/commit/main", data=commit, headers=headers).status_code == 507
    (small_disk / "filling").unlink()
    for method, url, options in changes[:-1]:
        assert requests.request(method, url, **{"headers": headers, **options}).ok, url


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
