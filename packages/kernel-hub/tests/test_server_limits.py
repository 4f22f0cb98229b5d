"""Quotas, the index of repositories, and the end of permissions."""

from __future__ import annotations

import gc
import hashlib
import os
import sqlite3
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import anyio
import pygit2
import pytest
import requests
from huggingface_hub import CommitOperationAdd
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import paginate
from raw_requests import TOKEN, begin, memory, until
from starlette.types import Message, Receive, Scope, Send
from test_server_bad_input import shard

from kernel_format.errors import HubError
from kernel_hub import mend, tokens
from kernel_hub.git.ignore import ignored
from kernel_hub.http.turns import ReadTurns
from kernel_hub.hub_service import Hub
from kernel_hub.repositories import index as repository_index
from kernel_hub.settings import Settings
from kernel_hub.xet.format import Xorb
from kernel_hub.xet.hashes import xorb_hash
from tests.support.running_hub import RunningHub


def commit(hub: RunningHub, repo_id: str, path: str, content: bytes) -> None:
    hub.api().create_commit(repo_id, [CommitOperationAdd(path, content)], commit_message="m", repo_type="kernel")


# Quotas


def test_quotas_of_repositories_organisations_and_the_server(
    start_hub: Callable[..., RunningHub], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)  # xorbs count as well
    hub = start_hub("--repository-quota", "2", "--organization-quota", "3", "--quota", "4")
    for repo_id in ("a/one", "a/two", "b/one", "b/two"):
        hub.api().create_repo(repo_id, repo_type="kernel")
    commit(hub, "a/one", "x.so", os.urandom(1_400_000))
    for repo_id, size, reason in (
        ("a/one", 1_400_000, "the repository a/one has"),
        ("a/two", 1_700_000, "the organisation a has"),
        ("b/one", 2_100_000, "the repository b/one has"),
    ):
        for path in ("y.so", "y.txt"):
            with pytest.raises(HfHubHTTPError, match=reason):
                commit(hub, repo_id, path, os.urandom(size) if path == "y.so" else b"y" * size)
    commit(hub, "a/two", "x.txt", b"x" * 900_000)
    commit(hub, "b/one", "x.so", os.urandom(1_000_000))
    with pytest.raises(HfHubHTTPError, match="this Hub has"):
        commit(hub, "b/two", "x.so", os.urandom(1_000_000))
    copied = {"target": {"type": "kernel", "name": "b/two"}, "files": []}
    sha256 = hub.api().list_repo_tree("b/one", repo_type="kernel")
    large = [item.lfs.sha256 for item in sha256 if getattr(item, "lfs", None)]
    copied["files"] = [{"sha256": large[0]}]
    answer = requests.post(f"{hub.url}/api/kernels/b/one/lfs-files/duplicate", json=copied, headers=TOKEN)
    assert answer.status_code == 413 and answer.headers["X-Error-Code"] == "QuotaExceeded"
    hub.api().delete_repo("a/one", repo_type="kernel")
    commit(hub, "b/two", "x.so", os.urandom(1_000_000))


def words(digest: str) -> bytes:
    """Return the bytes of a hash that was written as four little-endian words."""
    return b"".join(bytes.fromhex(digest)[start : start + 8][::-1] for start in range(0, 32, 8))


def test_what_a_shard_describes_is_counted_before_it_is_written(start_hub: Callable[..., RunningHub]) -> None:
    """A shard of a kilobyte refers to one chunk a thousand times."""
    hub = start_hub("--repository-quota", "50")
    hub.api().create_repo("a/one", repo_type="kernel")
    granted = requests.get(f"{hub.url}/api/kernels/a/one/xet-write-token/main", headers=TOKEN).json()
    send = {"Authorization": f"Bearer {granted['accessToken']}"}
    data = os.urandom(100_000)
    size = len(data).to_bytes(3, "little")
    chunk = b"\0" + size + b"\0" + size + data
    (path := hub.root / "chunk").write_bytes(chunk)
    with path.open("rb") as file:
        name = xorb_hash(Xorb("x", file))
    assert requests.post(f"{granted['casUrl']}/v1/xorbs/default/{name}", data=chunk, headers=send).ok
    repeated = hashlib.sha256(data * 1000).digest()
    whole = shard(words(name), (0, 1), len(data), repeated)
    part = whole[96:144]
    described = whole[:48] + whole[48:80] + (1 << 30).to_bytes(4, "little") + (1000).to_bytes(4, "little") + bytes(8)
    described += part * 1000 + whole[144:]
    answer = requests.post(f"{granted['casUrl']}/v1/shards", data=described, headers=send)
    assert answer.status_code == 413 and "would add 100000000" in answer.text
    # The file system has not seen any of it.
    assert not [path for path in (hub.root / "large").rglob("*") if path.is_file()]
    fits = described.replace(
        (1000).to_bytes(4, "little") + bytes(8) + part * 1000, (10).to_bytes(4, "little") + bytes(8) + part * 10
    )
    fits = fits.replace(words(repeated.hex()), words(hashlib.sha256(data * 10).hexdigest()))
    assert requests.post(f"{granted['casUrl']}/v1/shards", data=fits, headers=send).ok


# The end of permissions


def test_signed_addresses_end_with_the_token(start_hub: Callable[..., RunningHub], tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    writer = tokens.add(file, "ci", read=(), write=("a",))
    other = tokens.add(file, "other", read=(), write=("a",))
    hub = start_hub("--token-file", str(file))
    hub.api(writer).create_repo("a/one", repo_type="kernel", private=True)
    data = os.urandom(1000)
    sha256 = hashlib.sha256(data).hexdigest()

    def address(operation: str, token: str) -> str:
        body = {"operation": operation, "objects": [{"oid": sha256, "size": 1000}]}
        batch = requests.post(
            f"{hub.url}/kernels/a/one.git/info/lfs/objects/batch",
            json=body,
            headers={"Authorization": f"Bearer {token}"},
        )
        return str(batch.json()["objects"][0]["actions"][operation]["href"])

    upload, upload_by_other = address("upload", writer), address("upload", other)
    granted = requests.get(
        f"{hub.url}/api/kernels/a/one/xet-write-token/main", headers={"Authorization": f"Bearer {writer}"}
    ).json()
    xet = {"Authorization": f"Bearer {granted['accessToken']}"}
    xorb, shards = f"{granted['casUrl']}/v1/xorbs/default/{'1' * 64}", f"{granted['casUrl']}/v1/shards"
    assert {requests.post(url, data=b"?", headers=xet).status_code for url in (xorb, shards)} == {400}
    assert requests.put(upload_by_other, data=data).ok
    download = address("download", writer)
    assert requests.get(download).content == data
    tokens.remove(file, "ci")
    assert requests.put(upload, data=data).status_code == 401
    assert requests.get(download).status_code == 401
    assert requests.get(download.replace(tokens.TokenFile(file).tokens()[0].sha256[:4], "x")).status_code in {401, 403}
    assert {requests.post(url, data=b"?", headers=xet).status_code for url in (xorb, shards)} == {401}
    assert requests.get(address("download", other)).content == data


def test_a_pull_request_is_for_a_branch(hub: RunningHub) -> None:
    api = hub.api()
    head = str(api.create_repo("a/one", repo_type="kernel") and api.repo_info("a/one", repo_type="kernel").sha)
    api.create_tag("a/one", tag="t", repo_type="kernel")

    def change() -> list[CommitOperationAdd]:
        return [CommitOperationAdd("x", os.urandom(8).hex().encode())]

    first = api.create_commit("a/one", change(), commit_message="m", repo_type="kernel", create_pr=True)
    assert first.pr_num == 1
    for revision in (head, "t", "refs/pr/1", "refs/tags/t"):
        with pytest.raises(HfHubHTTPError, match="no branch"):
            api.create_commit(
                "a/one", change(), commit_message="m", repo_type="kernel", create_pr=True, revision=revision
            )


# .gitignore


def test_gitignore_counts_in_uploads(hub: RunningHub, tmp_path: Path) -> None:
    files = {
        ".gitignore": "*.log\n!keep.log\nbuild/\n/top\n",
        "a.log": "",
        "keep.log": "k",
        "build/x": "b",
        "sub/top": "s",
        "top": "t",
    }
    for path, content in files.items():
        (tmp_path / "up" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "up" / path).write_text(content or "x")
    api = hub.api()
    api.create_repo("a/one", repo_type="kernel")
    api.upload_folder(repo_id="a/one", folder_path=tmp_path / "up", repo_type="kernel")
    expected = {".gitignore", "keep.log", "sub/top"}
    assert set(api.list_repo_files("a/one", repo_type="kernel")) == expected
    # Later uploads follow the .gitignore of the repository.
    api.upload_file(path_or_fileobj=b"x", path_in_repo="later.log", repo_id="a/one", repo_type="kernel")
    assert set(api.list_repo_files("a/one", repo_type="kernel")) == expected
    began = time.monotonic()
    assert not ignored(b"a" + b"*a" * 200 + b"b\n" + b"**/" * 200 + b"c\n", ["a" * 250] * 100)
    assert time.monotonic() - began < 10


def test_usual_rules_start_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a process takes 0.2 s"))
    rules = b"# of Python\n__pycache__/\n*.pyc\n**/node_modules\n!keep.pyc\n/build\n"
    paths = ["a/__pycache__/b", "c.pyc", "keep.pyc", "a/b/node_modules/c", "build/x", "a/build/x", "x.py"]
    assert ignored(rules, paths * 20) == {"a/__pycache__/b", "c.pyc", "a/b/node_modules/c", "build/x"}


@pytest.mark.parametrize(
    ("rule", "path"),
    [("**/a/" * 16 + "b", "a/" * 31 + "c"), ("*a*/" * 8 + "b", "/".join(["a" * 100] * 9 + ["c"]))],
)
def test_rules_that_take_git_hours_do_not_stop_the_server(hub: RunningHub, rule: str, path: str) -> None:
    """libgit2 keeps the interpreter's lock while it matches, so nobody else was served, nor was a signal."""
    api = hub.api()
    api.create_repo("a/one", repo_type="kernel")
    address = f"{hub.url}/api/kernels/a/one/preupload/main"
    body = {"files": [{"path": path, "size": 1}], "gitIgnore": rule}
    slowest = 0.0
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(requests.post, address, json=body, headers=TOKEN, timeout=60)
        while not answer.done():
            began = time.monotonic()
            assert requests.get(f"{hub.url}/health", timeout=30).ok
            slowest = max(slowest, time.monotonic() - began)
            time.sleep(0.05)
    assert answer.result().status_code == 400 and "too long" in answer.result().json()["error"]
    assert slowest < 5


@pytest.mark.parametrize(
    ("given", "works"), [("blob:none", True), ("blob:limit=1k", True), ("sparse:oid=main:f", False)]
)
def test_filters_of_clones_match_no_patterns(hub: RunningHub, tmp_path: Path, given: str, works: bool) -> None:
    hub.api().create_repo("a/one", repo_type="kernel")
    commit(hub, "a/one", "f", b"**/a/" * 16)
    command = [
        "git",
        "clone",
        "--quiet",
        "--no-checkout",
        f"--filter={given}",
        f"{hub.url}/kernels/a/one",
        tmp_path / "clone",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == works and ("not supported" in done.stderr) != works


# The index


def listed(hub: RunningHub, **query: Any) -> list[str]:
    return [item["id"] for item in requests.get(f"{hub.url}/api/kernels", params=query, headers=TOKEN).json()]


def test_lists_have_pages(hub: RunningHub) -> None:
    names = [f"{organization}/k{number:02}" for organization in ("a", "b") for number in range(30)]
    for name in names:
        hub.api().create_repo(name, repo_type="kernel", private=name == "a/k07")
    assert listed(hub) == names
    assert [item["id"] for item in paginate(f"{hub.url}/api/kernels", params={"limit": 7}, headers=TOKEN)] == names
    assert [
        item["id"] for item in paginate(f"{hub.url}/api/kernels", params={"limit": 7, "search": "K1"}, headers={})
    ] == [name for name in names if "k1" in name]
    assert listed(hub, author="b") == names[30:]
    anonymous = requests.get(f"{hub.url}/api/kernels").json()
    assert [item["id"] for item in anonymous] == [name for name in names if name != "a/k07"]
    first = requests.get(f"{hub.url}/", headers=TOKEN).text
    assert first.count('href="/kernels/') == 50 and "More kernels" in first and "a/k00" in first
    second = requests.get(f"{hub.url}/", params={"after": "b/k19"}, headers=TOKEN).text
    assert second.count('href="/kernels/') == 10 and "More kernels" not in second
    overview = requests.get(f"{hub.url}/api/organizations/a/overview").json()
    assert overview["numKernels"] == 29


def test_the_index_follows_every_change(hub: RunningHub, monkeypatch: pytest.MonkeyPatch) -> None:
    api = hub.api()
    api.create_repo("a/one", repo_type="kernel")
    commit(hub, "a/one", "README.md", b"---\ntags: [kernel]\n---\n# One\n\nThe first paragraph.\n")
    api.create_branch("a/one", branch="v2", repo_type="kernel")
    page = requests.get(f"{hub.url}/").text
    assert "The first paragraph." in page and ">v2<" in page
    assert requests.get(f"{hub.url}/api/kernels").json()[0]["sha"] == api.repo_info("a/one", repo_type="kernel").sha
    api.move_repo("a/one", "b/two", repo_type="kernel")
    api.delete_branch("b/two", branch="v2", repo_type="kernel")
    page = requests.get(f"{hub.url}/").text
    assert "b/two" in page and "a/one" not in page and ">v2<" not in page
    hub.stop()
    # As if the server had been killed after it had moved a ref: the mark is there, and the index is behind.
    opened = Hub(Settings(hub.root))
    git = pygit2.Repository(str(hub.root / "repositories/b/two.git"))
    parent = git.references["refs/heads/main"].peel(pygit2.Commit)
    with closing(sqlite3.connect(hub.root / "index.sqlite")) as database, database:
        database.execute("INSERT INTO marks (repo_id, began, since) VALUES ('b/two', ?, ?)", (time.time() - 5,) * 2)
    who = pygit2.Signature("a", "a@b")
    moved = str(git.create_commit("refs/heads/main", who, who, "m", parent.tree_id, [parent.id]))
    assert [item.commit for item in opened.index.page(None, count=9)] == [moved]
    # Changes by others, without a mark: `hub check` reads every repository.
    again = str(git.create_commit("refs/heads/main", who, who, "m", parent.tree_id, [moved]))
    assert not list(mend.find_defects(opened))
    assert [item.commit for item in opened.index.page(None, count=9)] == [again]
    # A damaged or missing index is built anew, but not while another server has it open.
    before = opened.index.page(None, count=9)
    monkeypatch.setattr(repository_index, "_ALONE_SECONDS", 0.1)
    index = hub.root / "index.sqlite"
    index.unlink()
    index.write_bytes(b"damaged" * 1000)
    with pytest.raises(HubError, match="other servers use it"):
        Hub(Settings(hub.root))
    del opened
    for damaged in (True, False):
        gc.collect()  # a Hub uses the index until it is freed
        if not damaged:
            index.unlink()
        assert Hub(Settings(hub.root)).index.page(None, count=9) == before


# Turns


def test_reads_wait_for_a_place_and_health_does_not() -> None:
    """A read has its place until its answer begins, so readers that do not read keep nobody waiting."""
    begun: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.append(scope["path"])
        if scope["path"] == "/slow-to-answer":
            await anyio.sleep_forever()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/slow-to-read":
            await anyio.sleep_forever()

    async def ask() -> None:
        turns = ReadTurns(app, count=2)

        async def get(path: str, method: str = "GET") -> None:
            await turns({"type": "http", "method": method, "path": path}, receive, send)

        async def receive() -> Message:
            raise AssertionError

        async def send(message: Message) -> None:
            pass

        async with anyio.create_task_group() as group:
            for path in ("/slow-to-read",) * 5 + ("/slow-to-answer",) * 3:
                group.start_soon(get, path)
            await anyio.wait_all_tasks_blocked()
            assert begun == ["/slow-to-read"] * 5 + ["/slow-to-answer"] * 2
            with anyio.fail_after(10):
                await get("/health")
                await get("/commit", "POST")
            group.cancel_scope.cancel()

    anyio.run(ask)


# Cards: little Markdown that stands for much HTML, or takes long to parse or to clean

COSTLY_CARDS = {
    "rows without the cells of the head": "|" + "a|" * 300 + "\n|" + "-|" * 300 + "\n" + "a\n" * 9000,
    "many tables": ("|" + "a|" * 60 + "\n|" + "-|" * 60 + "\n" + "a\n" * 60 + "\n") * 85,
    "quotes": "> " * 16_000,
    "open elements": "<blockquote>" * 2700,
    "images": "![" * 16_000,
    "ampersands": "&a;" * 10_000,
}


def test_costly_cards_are_small_pages(hub: RunningHub) -> None:
    for number, card in enumerate(COSTLY_CARDS.values()):
        hub.api().create_repo(f"a/card{number}", repo_type="kernel")
        commit(hub, f"a/card{number}", "README.md", card.encode())
    before = memory(hub)
    with ThreadPoolExecutor(12) as pool:
        pages = list(pool.map(requests.get, [f"{hub.url}/kernels/a/card{n}" for n in range(len(COSTLY_CARDS))] * 4))
    assert {page.status_code for page in pages} == {200}
    assert max(len(page.content) for page in pages) < 100_000
    assert ["is too large to show here" in page.text for page in pages[:3]] == [True] * 3
    assert memory(hub) - before < 150


# Slots


def test_a_client_that_sends_slowly_leaves_places_for_others(
    start_hub: Callable[..., RunningHub], tmp_path: Path
) -> None:
    """A byte now and then is no timeout, so one token held all places for commits as long as it wanted."""
    file = tmp_path / "tokens.json"
    slow, other = (tokens.add(file, name, read=(), write=(name,)) for name in ("slow", "other"))
    hub = start_hub("--token-file", str(file))
    for name, token in (("slow/one", slow), ("other/one", other)):
        hub.api(token).create_repo(name, repo_type="kernel")
    address = f"{hub.url}/api/kernels/slow/one/commit/main"
    header = b'{"key": "header", "value": {"summary": "s"}}'

    def status(name: str, token: str) -> int:
        url = f"{hub.url}/api/kernels/{name}/one/commit/main"
        return requests.post(url, data=header, headers={"Authorization": f"Bearer {token}"}).status_code

    with ExitStack() as opened:
        for _ in range(64):
            opened.enter_context(begin(address, "POST", 1000, header, token=slow))
        assert until(lambda: status("slow", slow) == 503)
        assert status("other", other) == 200
    assert until(lambda: status("slow", slow) == 200)
