"""Durability and space: crashes, git processes, repairs, a full disk, and the files that `gc` frees."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import requests
from huggingface_hub import HfApi
from raw_requests import TOKEN, begin, commit, commit_body, hub_command, signed_address, until

from kernel_format.errors import HubError
from kernel_hub.hub_service import Hub
from kernel_hub.maintenance import collect, find_defects
from kernel_hub.settings import Settings
from tests.support.cli import expect
from tests.support.git import git
from tests.support.places import SOURCES
from tests.support.running_hub import RunningHub
from tests.support.small_kernel import KERNEL, VARIANT, publish_kernel, write_kernel

pytestmark = pytest.mark.attack


def test_nothing_is_lost_beside_git_gc(hub: RunningHub, api: HfApi) -> None:
    """Commit to two branches while git packs refs and objects; every acknowledged commit is in the history."""
    repository = hub.root / "repositories" / f"{KERNEL}.git"
    acknowledged: dict[str, list[str]] = {"a": [], "b": []}
    statuses: list[int] = []
    stop = threading.Event()

    def commits(branch: str) -> None:
        url, headers = f"{hub.url}/api/kernels/{KERNEL}", TOKEN
        requests.post(f"{url}/branch/{branch}", json={}, headers=headers)
        while not stop.is_set():
            body = commit_body("f", f"{branch} {len(acknowledged[branch])}")
            done = requests.post(f"{url}/commit/{branch}", data=body, headers=headers)
            statuses.append(done.status_code)
            statuses.append(requests.get(f"{url}/tree/{branch}").status_code)
            statuses.append(requests.get(f"{url}/refs").status_code)
            if done.ok:
                acknowledged[branch].append(done.json()["commitOid"])

    def packs(*command: str) -> None:
        while not stop.is_set():
            subprocess.run(["git", "-C", repository, *command], capture_output=True, check=False)

    def repairs() -> None:
        while not stop.is_set():
            assert not list(find_defects(Hub(Settings(hub.root))))
            list(collect(Hub(Settings(hub.root)), unused_seconds=0))

    jobs = [(commits, "a"), (commits, "b"), (packs, "pack-refs", "--all", "--prune"), (packs, "repack", "-adq")]
    with ThreadPoolExecutor(6) as at_once:
        done = [at_once.submit(*job) for job in [*jobs, (packs, "gc", "-q")]] + [at_once.submit(repairs)]
        time.sleep(1)
        until(lambda: min(map(len, acknowledged.values())) > 5)
        stop.set()
    for job in done:
        job.result()
    assert set(statuses) == {200}
    for branch, expected in acknowledged.items():
        assert len(expected) > 5 and set(expected) <= set(git(repository, "rev-list", branch).split())


def test_check_repairs_traces_of_crashes_and_reports_damage(hub: RunningHub, tmp_path: Path) -> None:
    publish_kernel(hub, write_kernel(tmp_path / "one"))
    repository = hub.root / "repositories" / f"{KERNEL}.git"
    left = [hub.root / "incoming/half", repository.parent / ".new-1", repository / "objects/tmp_object_git2_a1b2c3"]
    left.append(repository / "refs/heads/v1.lock")  # of a killed git process
    for path in left:
        path.mkdir() if path.name == ".new-1" else path.write_bytes(b"half")
    checked = Hub(Settings(hub.root))
    assert not list(find_defects(checked, repair=False))  # too new: a server may be using them
    for path in left:
        os.utime(path, (0, 0))
    defects = list(find_defects(checked))
    assert sorted(item.where.rpartition("/")[2] for item in defects) == sorted(path.name for path in left)
    assert not list(find_defects(checked))

    table = next(path for path in (hub.root / "large").rglob("*") if path.is_file() and path.stat().st_size > 1000)
    with table.open("r+b") as file:
        file.write(b"damaged")
    done = hub_command("check", "--root", hub.root, "--digests")
    assert done.returncode == HubError.exit_code and "its content changed on the disk" in done.stdout
    assert requests.get(f"{hub.url}/kernels/{KERNEL}/resolve/v1/build/{VARIANT}/table.bin").status_code == 404
    publish_kernel(hub, write_kernel(tmp_path / "three"))
    commit(hub.api(), KERNEL, "again", bytes(range(256)) * 5000 + b"!", revision="v1")


def test_check_keeps_the_files_of_a_commit_that_is_arriving(hub: RunningHub, api: HfApi) -> None:
    long = "".join(f"\n{json.dumps({'key': 'file', 'value': file})}" for file in (encoded("a.so"), encoded("b.so")))
    body = (commit_body("c", "c") + long).encode()
    slow = begin(f"{hub.url}/api/kernels/{KERNEL}/commit/main", "POST", len(body), body[:-200_000])
    incoming = hub.root / "incoming"
    assert until(lambda: sum(path.stat().st_size for path in incoming.rglob("*") if path.is_file()) > 310_000)
    for path in incoming.rglob("*"):
        os.utime(path, (0, 0))
    slow.sendall(body[-200_000:-100])
    assert until(lambda: any(path.stat().st_mtime for path in incoming.iterdir()))
    assert not list(find_defects(Hub(Settings(hub.root))))
    slow.sendall(body[-100:])
    assert slow.recv(1000).startswith(b"HTTP/1.1 200")


def encoded(path: str) -> dict[str, str]:
    return {"path": path, "encoding": "base64", "content": base64.b64encode(os.urandom(300_000)).decode()}


def test_a_change_waits_for_the_lock_of_another_git_process(hub: RunningHub, api: HfApi) -> None:
    """`git pack-refs` holds the lock of a ref while it deletes the loose file."""
    lock = hub.root / "repositories" / f"{KERNEL}.git" / "refs/heads/main.lock"
    lock.touch()

    def commit_directly(path: str) -> requests.Response:
        address = f"{hub.url}/api/kernels/{KERNEL}/commit/main"
        return requests.post(address, data=commit_body(path, "a"), headers=TOKEN, timeout=40)

    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(commit_directly, "a")
        time.sleep(0.5)
        assert not waiting.done()
        lock.unlink()
        assert waiting.result().ok
    lock.touch()
    refused = commit_directly("b")
    assert refused.status_code == 503 and "locked" in refused.json()["error"] and lock.exists()


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
    api = f"{hub.url}/api/kernels/{KERNEL}"
    hub.api().create_repo(KERNEL, repo_type="kernel")
    hub.api().create_repo("o/spare", repo_type="kernel")
    large = os.urandom(500_000)
    address, body = signed_address(hub, large), commit_body("a", "a")
    changes: list[tuple[str, str, dict[str, Any]]] = [
        ("POST", f"{api}/commit/main", {"data": body}),
        ("POST", f"{api}/branch/v1", {"json": {}}),
        ("POST", f"{api}/tag/main", {"json": {"tag": "t", "message": "m"}}),
        ("PUT", f"{api}/settings", {"json": {"private": False}}),
        ("POST", f"{hub.url}/api/repos/create", {"json": {"name": "b", "organization": "o", "type": "kernel"}}),
        ("PUT", address, {"data": large}),
    ]
    filled()
    for _ in range(2):
        for method, url, options in changes:
            answer = requests.request(method, url, headers=TOKEN, **options)
            assert answer.status_code == 507, (url, answer.text)
        assert requests.get(api).ok and requests.get(f"{hub.url}/").ok and requests.get(f"{hub.url}/health").ok
    assert requests.get(f"{hub.url}/api/kernels").ok
    assert not list(find_defects(Hub(Settings(hub.root))))
    hub.api().delete_repo("o/spare", repo_type="kernel")
    assert [item["id"] for item in requests.get(f"{hub.url}/api/kernels").json()] == [KERNEL]
    filled()
    assert requests.post(f"{api}/commit/main", data=body, headers=TOKEN).status_code == 507
    (small_disk / "filling").unlink()
    for method, url, options in changes:
        assert requests.request(method, url, headers=TOKEN, **options).ok, url


def stored(hub: RunningHub) -> set[str]:
    return {path.name for path in (hub.root / "large").rglob("*") if path.is_file()}


def gc(hub: RunningHub, *options: str) -> dict[str, Any]:
    return dict(json.loads(expect(0, "", "hub", "gc", "--root", hub.root, "--json", *options).stdout))


def age(hub: RunningHub, days: float) -> None:
    """Make all stored files older."""
    for folder in ("large", "repositories"):
        for path in (hub.root / folder).rglob("*"):
            if path.is_file():
                then = path.stat().st_mtime - days * 86400
                os.utime(path, (then, then))


def test_gc_frees_unreferenced_files(hub: RunningHub, tmp_path: Path) -> None:
    api = hub.api()
    for repo_id in ("a/one", "a/gone", "b/two"):
        api.create_repo(repo_id, repo_type="kernel")
    api.create_branch("a/one", branch="v1", repo_type="kernel")
    kept, shared, dropped, gone = (os.urandom(1_200_000) for _ in range(4))
    commit(api, "a/one", "build/kept", kept)
    for name, content in (("dropped", dropped), ("shared", shared), ("text", os.urandom(20_000).hex().encode())):
        commit(api, "a/one", f"build/{name}", content, revision="v1")
    commit(api, "b/two", "build/shared", shared)
    for name, content in (("gone", gone), ("shared", shared)):
        commit(api, "a/gone", f"build/{name}", content)
    api.delete_branch("a/one", branch="v1", repo_type="kernel")
    api.delete_repo("a/gone", repo_type="kernel")
    assert stored(hub) == {hashlib.sha256(content).hexdigest() for content in (kept, shared, dropped)}
    assert gc(hub) == {"freed": [], "bytes": 0}  # all of it is young
    age(hub, 8)
    before = stored(hub)
    planned = gc(hub, "--dry-run")
    assert stored(hub) == before and planned == gc(hub, "--dry-run") and 1_200_000 < planned["bytes"] < 1_300_000
    done = gc(hub)
    objects = [item for item in done["freed"] if item["where"] == "a/one: git objects"]
    assert len(objects) == 1 and objects[0]["size"] > 0
    assert {item["where"] for item in done["freed"]} == {item["where"] for item in planned["freed"]}
    assert len(stored(hub)) == len(before) - 1
    assert gc(hub) == {"freed": [], "bytes": 0}
    assert not list(find_defects(Hub(Settings(hub.root))))
    for repo_id, name in (("a/one", "kept"), ("b/two", "shared")):
        assert api.hf_hub_download(repo_id, f"build/{name}", repo_type="kernel", cache_dir=tmp_path / "cache")
        git(hub.root / f"repositories/{repo_id}.git", "fsck", "--strict")
    sizes = [item.bytes for item in Hub(Settings(hub.root)).index.page(None, count=9)]
    assert all(1_200_000 < size < 1_300_000 for size in sizes), sizes


def test_gc_keeps_files_that_are_being_published_again(hub: RunningHub, api: HfApi, tmp_path: Path) -> None:
    """A client does not send a stored file again, and commits it now."""
    api.create_branch("a/one", branch="v1", repo_type="kernel")
    (tmp_path / "table").write_bytes(os.urandom(1_200_000))
    code = SOURCES["late_commit"].format(tmp_path=tmp_path)
    environment = {**hub.environment, "HF_HUB_DISABLE_XET": "1"}
    for branch in ("v1", "main"):
        command = [sys.executable, "-c", code, branch]
        with subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None and process.stdout.readline() == "sent\n"
            if branch == "main":
                gc(hub)
            process.communicate("\n", timeout=60)
        assert process.returncode == 0
        if branch == "v1":
            api.delete_branch("a/one", branch="v1", repo_type="kernel")
            api.create_branch("a/one", branch="v1", repo_type="kernel")
            age(hub, 8)
    assert api.hf_hub_download("a/one", "table", repo_type="kernel", cache_dir=tmp_path / "cache")
