"""Small requests that stand for much work: each is counted before it is done, and ends when nobody waits for it."""

from __future__ import annotations

import hashlib
import io
import os
import signal
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import lz4.frame  # type: ignore[import-untyped]
import pygit2
import pytest
import requests
from pygit2.enums import FileMode
from raw_requests import TOKEN, begin, memory, until
from test_server_limits import words

from kernel_hub.git import trees
from kernel_hub.git.objects import FileChange
from kernel_hub.git.repository import GitRepository
from kernel_hub.refusals import Refusal
from kernel_hub.xet.format import Xorb
from kernel_hub.xet.hashes import xorb_hash
from tests.support.running_hub import RunningHub
from tests.support.small_kernel import KERNEL

# Xet


def chunk(data: bytes, *, packed: bool = False) -> bytes:
    """Return a chunk as a xorb has it."""
    stored = lz4.frame.compress(data) if packed else data
    return b"\0" + len(stored).to_bytes(3, "little") + bytes([packed]) + len(data).to_bytes(3, "little") + stored


def shard_of(ranges: list[tuple[str, int, int, int]], sha256: str) -> bytes:
    """Return a shard of one file; a range is a xorb, its size, and the first and the last chunk."""
    parts = [words(xorb) + struct.pack("<IIII", 0, size, start, end) for xorb, size, start, end in ranges]
    head = b"HFRepoMetaData\0".ljust(32, b"\1") + struct.pack("<QQ", 2, 0)
    file = bytes(32) + struct.pack("<II", 1 << 30, len(parts)) + bytes(8)
    end = (b"\xff" * 32).ljust(48, b"\0")
    return head + file + b"".join(parts) + words(sha256).ljust(48, b"\0") + end + end


class Uploader:
    """A client of Xet that sends what it likes."""

    def __init__(self, hub: RunningHub) -> None:
        hub.api().create_repo(KERNEL, repo_type="kernel", exist_ok=True)
        granted = requests.get(f"{hub.url}/api/kernels/{KERNEL}/xet-write-token/main", headers=TOKEN).json()
        self.url, self.token = granted["casUrl"], granted["accessToken"]

    def post(self, path: str, data: bytes) -> requests.Response:
        headers = {"Authorization": f"Bearer {self.token}"}
        return requests.post(f"{self.url}/v1/{path}", data=data, headers=headers, timeout=60)

    def xorb(self, data: bytes) -> str:
        """Store a xorb, and return its name."""
        name = xorb_hash(Xorb("x", io.BytesIO(data)))
        self.post(f"xorbs/default/{name}", data)
        return name


def test_shards_of_many_ranges_of_nothing_stop_nobody(hub: RunningHub) -> None:
    """16 shards of 20,000 ranges of empty chunks took every thread for good."""
    uploader = Uploader(hub)
    assert uploader.post(f"xorbs/default/{'1' * 64}", chunk(b"") * 8000).status_code == 400
    empty = uploader.xorb(chunk(b"x") * 8000)
    nothing = hashlib.sha256(b"").hexdigest()
    hostile = shard_of([(empty, 0, 0, 8000)] * 20_000, nothing)
    with ThreadPoolExecutor(16) as pool:
        began = time.monotonic()
        answers = [pool.submit(uploader.post, "shards", hostile) for _ in range(16)]
        while not all(answer.done() for answer in answers):
            assert requests.get(f"{hub.url}/api/kernels", timeout=10).ok
        assert {answer.result().status_code for answer in answers} == {400}
    assert time.monotonic() - began < 20
    assert "chunks" in answers[0].result().text


def test_ranges_that_make_the_hub_read_xorbs_again_and_again_are_counted(hub: RunningHub) -> None:
    uploader = Uploader(hub)
    xorbs = [uploader.xorb(chunk(bytes([number])) * 8000 + chunk(os.urandom(100_000))) for number in range(20)]
    ranges = [(xorb, 100_000, 8000, 8001) for xorb in xorbs] * 1000  # each but the last 16 is opened and scanned
    began = time.monotonic()
    answer = uploader.post("shards", shard_of(ranges[:2000], "0" * 64))
    assert answer.status_code == 400, answer.text
    assert time.monotonic() - began < 20
    assert requests.get(f"{hub.url}/health").ok


def long_shard(uploader: Uploader) -> bytes:
    """Return a shard of 6 GB, from one chunk."""
    data = bytes(1 << 20)
    name = uploader.xorb(chunk(data, packed=True))
    return shard_of([(name, 1 << 20, 0, 1)] * 6000, "0" * 64)


def staged(hub: RunningHub) -> int:
    """Return the size of the largest upload in progress."""
    sizes = [0]
    for path in (hub.root / "incoming").iterdir():
        try:
            sizes.append(path.stat().st_size)
        except FileNotFoundError:
            continue
    return max(sizes)


def test_work_ends_when_its_client_leaves(hub: RunningHub) -> None:
    uploader = Uploader(hub)
    shard = long_shard(uploader)
    connection = begin(f"{uploader.url}/v1/shards", "POST", len(shard), shard, token=uploader.token)
    assert until(lambda: staged(hub) > 20_000_000)
    connection.close()
    assert until(lambda: not list((hub.root / "incoming").iterdir()), seconds=2)
    assert requests.get(f"{hub.url}/health").ok
    assert '"level": "error"' not in hub.log.read_text()


def test_sigterm_ends_the_server_whatever_runs(hub: RunningHub) -> None:
    uploader = Uploader(hub)
    shard = long_shard(uploader)
    connections = [
        begin(f"{uploader.url}/v1/shards", "POST", len(shard), shard, token=uploader.token) for _ in range(3)
    ]
    # And a client that never ends its commit.
    connections.append(begin(f"{hub.url}/api/kernels/{KERNEL}/commit/main", "POST", 1000, b"{"))
    assert until(lambda: staged(hub) > 20_000_000)
    began = time.monotonic()
    hub.send_signal(signal.SIGTERM)
    hub.wait()
    assert time.monotonic() - began < 5
    for connection in connections:
        connection.close()


# Trees


def bomb(git: pygit2.Repository, *, width: int, depth: int) -> pygit2.Oid:
    """Write a tree in which every folder is the same `width` times, and return it."""
    oid, mode = git.create_blob(b"x"), FileMode.BLOB
    for _ in range(depth):
        builder = git.TreeBuilder()
        for number in range(width):
            builder.insert(f"f{number}", oid, mode)
        oid, mode = builder.write(), FileMode.TREE
    return oid


def commit_tree(git: pygit2.Repository, tree: pygit2.Oid, ref: str = "refs/heads/main", seconds: int = 1) -> str:
    """Commit a tree, as no route of the Hub does."""
    who = pygit2.Signature("a", "a@b", seconds, 0)
    parents = [git.references[ref].target] if ref in git.references else []
    return str(git.create_commit(ref, who, who, "m", tree, parents))


@pytest.mark.parametrize("mirrored", [True, False])
def test_trees_that_stand_for_billions_of_files(
    start_hub: Callable[..., RunningHub], tmp_path: Path, mirrored: bool
) -> None:
    """A few hundred bytes of another Hub's took 3.7 GB of memory, and were never answered."""
    served = start_hub(root=tmp_path / "upstream")
    served.api().create_repo(KERNEL, repo_type="kernel")
    git = pygit2.Repository(str(served.root / "repositories" / f"{KERNEL}.git"))
    nested = bomb(git, width=1, depth=5000)
    for oid, ref in ((nested, "refs/heads/deep"), (bomb(git, width=10, depth=10), "refs/heads/main")):
        builder = git.TreeBuilder()
        builder.insert("build", oid, FileMode.TREE)
        commit_tree(git, builder.write(), ref)
    hub = served
    if mirrored:
        options = ("--mirror", served.url, "--mirror-organization", "kernels-community")
        hub = start_hub(*options, root=tmp_path / "mirror")
    before = memory(hub)
    commit = str(git.references["refs/heads/main"].target)
    addresses = [
        f"/api/kernels/{KERNEL}/tree/main?recursive=true",
        f"/api/kernels/{KERNEL}/tree/main/build?recursive=true",
        f"/api/kernels/{KERNEL}/tree/deep?recursive=true",
        f"/api/kernels/{KERNEL}/tree/main?expand=true",
        f"/kernels/{KERNEL}",
        f"/kernels/{KERNEL}/commit/{commit}",
        f"/kernels/{KERNEL}/commit/deep",
        f"/kernels/{KERNEL}/resolve/main/build/f0/f0",
        f"/api/kernels/{KERNEL}",
        "/",
    ]
    for address in addresses:
        began = time.monotonic()
        answer = requests.get(hub.url + address, timeout=30)
        assert answer.status_code in {200, 403, 404, 413}, (address, answer.text[:500])
        assert answer.status_code != 200 or len(answer.content) < 1_000_000
        assert time.monotonic() - began < 10, address
    assert memory(hub) - before < 150
    assert requests.get(f"{hub.url}/api/kernels/{KERNEL}/tree/main").json()  # the top alone is short
    assert '"request failed"' not in hub.log.read_text()


# Commits


@pytest.fixture
def repository(tmp_path: Path) -> GitRepository:
    """A repository without a server."""
    GitRepository.create("a/one", tmp_path / "one.git", private=True, author="a")
    return GitRepository("a/one", tmp_path / "one.git", lambda *_: nullcontext())


def made(repository: GitRepository, changes: list[FileChange]) -> str:
    return repository.commits.create("main", changes, title="t", description="", author="a")[0]


def test_a_commit_takes_time_in_proportion_to_its_changes(repository: GitRepository) -> None:
    """25,000 deleted folders took 46 s."""
    blob = repository.commits.write_blob(b"x")
    made(repository, [FileChange(f"d{number}/f", blob) for number in range(25_000)])
    began = time.process_time()
    changes = [FileChange(f"d{number}", is_folder=True) for number in range(24_999)]
    oid = made(repository, changes)
    assert time.process_time() - began < 6
    assert [entry.path for entry in repository.trees.entries(oid, recursive=True)] == [
        ".gitattributes",
        "d24999",
        "d24999/f",
    ]


def test_changes_of_a_commit_have_any_order(repository: GitRepository) -> None:
    blob = repository.commits.write_blob(b"x")
    other = repository.commits.write_blob(b"y")
    made(repository, [FileChange("a/b/c", blob), FileChange("f", blob), FileChange("g/h", blob)])
    # A file becomes a folder and a folder a file, whichever change is named first.
    oid = made(
        repository, [FileChange("f/x", blob), FileChange("f"), FileChange("g", blob), FileChange("g", is_folder=True)]
    )
    listed = {entry.path: entry.oid for entry in repository.trees.entries(oid, recursive=True) if not entry.is_folder}
    assert set(listed) == {".gitattributes", "a/b/c", "f/x", "g"}
    oid = made(repository, [FileChange("a/b/c", other), FileChange("a/d", blob)])
    assert repository.trees.entry(oid, "a/b/c").oid == other
    for changes, words_of in (
        ([FileChange("a", blob)], "both a file and a folder"),
        ([FileChange("n", blob), FileChange("n/m", blob)], "both a file and a folder"),
        ([FileChange("none")], "there is no such file"),
        ([FileChange("a")], "there is no such file"),
        ([FileChange("none", is_folder=True)], "there is no such folder"),
        ([FileChange("g", is_folder=True)], "there is no such folder"),
        ([FileChange("git~1", blob)], "git reserves it"),
    ):
        with pytest.raises(Refusal, match=words_of):
            made(repository, changes)
    oid = made(repository, [FileChange("a", is_folder=True)])
    assert repository.trees.find(oid, "a") is None


# Caches


def test_kept_lists_have_a_limit_in_bytes(repository: GitRepository, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six lists of 200,000 files took 365 MB for good."""
    blob = repository.commits.write_blob(b"x")
    tips = [made(repository, [FileChange(f"{n}/{'d' * 100}/f{i}", blob) for i in range(2000)]) for n in range(6)]
    monkeypatch.setattr(trees, "KEPT_BYTES", 1_000_000)
    for tip in tips * 2:
        listed = repository.trees.entries(tip, recursive=True)
        assert len(listed) % 2000 in range(20)
        assert trees.kept.size <= 1_000_000
    assert len(trees.kept) >= 1
    monkeypatch.setattr(trees, "MOST_ENTRIES", 5000)
    with pytest.raises(Refusal, match="more than 5000"):
        repository.trees.entries(tips[3], recursive=True)
    assert repository.trees.entries(tips[3])
