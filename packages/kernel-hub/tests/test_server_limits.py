"""The quota, signed addresses, `.gitignore`, clones, the index and costly cards."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import psutil
import pygit2
import pytest
import requests
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import paginate
from raw_requests import TOKEN, TokenHub, ask, begin, commit, commit_body, memory, signed_address, until
from starlette.testclient import TestClient

from kernel_format.errors import HubError
from kernel_format.files import locked
from kernel_hub import maintenance, tokens
from kernel_hub.app import create_app
from kernel_hub.git.command import ignored
from kernel_hub.git.objects import FileChange
from kernel_hub.hub_service import Hub
from kernel_hub.refusals import Refusal
from kernel_hub.routes import git
from kernel_hub.serve import listen
from kernel_hub.settings import RequestLimits, Settings
from tests.support.files import write_files
from tests.support.running_hub import RunningHub

pytestmark = pytest.mark.attack


def folders(files: int) -> list[str]:
    """Return the lines of a commit that creates 30 folders for each of some files."""
    return [commit_body(f"{n}/" * 30 + "x", "").splitlines()[1] for n in range(files)]


def test_the_quota(start_hub: Callable[..., RunningHub]) -> None:
    hub = start_hub("--quota", "4")
    for repo_id in ("a/one", "b/two"):
        hub.api().create_repo(repo_id, repo_type="kernel")
    slow = begin(signed_address(hub, bytes(3_800_000), repo_id="b/two"), "PUT", 3_800_000, b"x")
    commit(hub.api(), "a/one", "x.so", os.urandom(2_500_000))  # the slow upload keeps no space from others
    for path, content in (("y.so", os.urandom(1_600_000)), ("y.txt", b"y" * 1_600_000)):
        with pytest.raises(HfHubHTTPError, match="this Hub has"):
            commit(hub.api(), "b/two", path, content)
    sha256 = "0" * 64
    batch = {"operation": "upload", "objects": [{"oid": sha256, "size": 20_000_000_000}]}
    answer = requests.post(f"{hub.url}/kernels/b/two.git/info/lfs/objects/batch", json=batch, headers=TOKEN)
    assert answer.status_code == 413 and answer.headers["X-Error-Code"] == "QuotaExceeded"
    body = commit_body("z", "x" * 3_000_000)
    refused = requests.post(f"{hub.url}/api/kernels/b/two/commit/main", data=body, headers=TOKEN)
    assert refused.status_code == 413 and len(list((hub.root / "incoming").iterdir())) == 1  # the slow upload's
    tiny = "\n".join([body[: body.index("\n")], *(commit_body(f"{n}", f"{n}").partition("\n")[2] for n in range(400))])
    refused = requests.post(f"{hub.url}/api/kernels/b/two/commit/main", data=tiny, headers=TOKEN)
    assert refused.status_code == 413  # each takes a block of the disk
    deep = commit_body("z", "x") + "".join(f"\n{line}" for line in folders(40))
    refused = requests.post(f"{hub.url}/api/kernels/b/two/commit/main", data=deep, headers=TOKEN)
    assert refused.status_code == 413  # each folder as well
    slow.close()
    hub.api().delete_repo("a/one", repo_type="kernel")
    commit(hub.api(), "b/two", "x.so", os.urandom(2_500_000))


def test_the_quota_of_many_repositories(tmp_path: Path) -> None:
    hub = Hub(Settings(tmp_path, quota_bytes=1 << 30))
    with hub.index._database as database:
        database.execute("BEGIN")
        rows = ((f"a/{number}", "x" * 4000, 4096) for number in range(9))
        database.executemany("INSERT INTO repositories (repo_id, summary, bytes) VALUES (?, ?, ?)", rows)
    statements: list[str] = []
    database.set_trace_callback(statements.append)
    with hub.allowances.claim() as claim:  # without a read of the summaries
        claim(4096)
    plan = database.execute(f"EXPLAIN QUERY PLAN {statements.pop()}").fetchall()
    assert "USING COVERING INDEX sizes" in plan[0][-1], plan


def test_the_changes_of_open_commits_do_not_fill_the_memory(tmp_path: Path) -> None:
    app = create_app(Settings(tmp_path, limits=RequestLimits(bodies_bytes=256 << 10)))
    app.state.hub.repositories.create("a/one", private=False, author="a")
    header, _ = commit_body("x", "x").splitlines()
    delete = json.dumps({"key": "deletedFile", "value": {"path": "x" * 200}})
    for count, status in ((100, 404), (1000, 503)):
        client, lines = TestClient(app, base_url="http://localhost"), [header, *[delete] * count]
        answer = client.post("/api/kernels/a/one/commit/main", content="\n".join(lines), headers=TOKEN)
        assert answer.status_code == status


def stored(hub: RunningHub) -> tuple[set[Path], str]:
    lines = requests.get(f"{hub.url}/metrics").text.splitlines()
    files = {path for path in hub.root.rglob("*") if path.is_file() and "lock" not in path.name}
    return files, next(line for line in lines if line.startswith("hub_stored_bytes "))


def test_a_commit_that_fails_leaves_nothing(hub: RunningHub, api: HfApi) -> None:
    commit(api, "a/one", "x/y")

    before = stored(hub)
    header, text = commit_body("t", os.urandom(20_000).hex()).splitlines()
    files = [text, *(commit_body(path, "\0" + os.urandom(9).hex()).splitlines()[1] for path in ("a.so", "b/c"))]
    for lines, status in (
        (files, 400),  # no header
        ([header.replace('"summary"', '"parentCommit": "0000000", "summary"'), *files], 412),
        ([header, *files, text.replace('"t"', '"x"')], 400),  # both a file and a folder
        ([header, *files, text.replace('"t"', '"T"')], 400),
        ([header, *folders(70)], 413),
        ([header, *files, json.dumps({"key": "deletedFile", "value": {"path": "none"}})], 404),
    ):
        for query in ("", "?create_pr=1"):
            url = f"{hub.url}/api/kernels/a/one/commit/main{query}"
            answer = requests.post(url, data="\n".join(lines), headers=TOKEN)
            assert answer.status_code == status and stored(hub) == before, (answer.text, stored(hub)[0] - before[0])
    assert requests.post(url, data="\n".join([header, *files]), headers=TOKEN).ok
    done, counted = stored(hub)
    new = sum(path.stat().st_size for path in done - before[0])
    assert 0 < float(counted.split()[1]) - float(before[1].split()[1]) - new < 16 * 4096


def test_a_conflict_leaves_nothing(hub: RunningHub, api: HfApi) -> None:
    """Two branches change different lines of a file; and a branch moves between the two checks of a commit."""

    def write(first: int, last: int, **options: object) -> str:
        lines = b"".join(b"%d\n" % line for line in range(first, last))
        return str(commit(api, "a/one", "x", lines, **options).oid)

    old = write(0, 99)
    reviewed = write(0, 98, create_pr=True)
    head = write(1, 99)
    before = stored(hub)
    merge = f"{hub.url}/api/kernels/a/one/discussions/1/merge?commit={reviewed}"
    assert requests.post(merge, headers=TOKEN).status_code == 409 and stored(hub) == before
    lock, server = hub.root / "repositories/a/.lock-one.git", psutil.Process(hub.process.pid)
    with ThreadPoolExecutor(1) as other, locked(lock):
        waiting = other.submit(commit, api, "a/one", "x.so", os.urandom(9), parent_commit=head)
        assert until(lambda: str(lock) in [file.path for file in server.open_files()])
        pygit2.Repository(str(hub.root / "repositories/a/one.git")).references["refs/heads/main"].set_target(old)
    with pytest.raises(HfHubHTTPError, match="another commit came first"):
        waiting.result()
    assert stored(hub) == before


def test_signed_addresses_end_with_the_token(token_hub: TokenHub, tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    hub, writer, other = token_hub(ci={"write": ("a",)}, other={"write": ("a",)})
    hub.api(writer).create_repo("a/one", repo_type="kernel", private=True)
    data = os.urandom(20 << 20)

    def address(operation: str, token: str) -> str:
        return signed_address(hub, data, operation, repo_id="a/one", token=token)

    upload, upload_by_other = address("upload", writer), address("upload", other)
    assert requests.put(upload_by_other, data=data).ok
    download = address("download", writer)
    assert requests.get(download).content == data
    commit(hub.api(writer), "a/one", "w.bin", data)
    resolved = f"{hub.url}/kernels/a/one/resolve/main/w.bin"
    running = [
        requests.get(url, headers={"Authorization": f"Bearer {writer}"}, stream=True) for url in (download, resolved)
    ]
    header, *_ = commit_body("x", "x").splitlines()
    commits = begin(f"{hub.url}/api/kernels/a/one/commit/main", "POST", len(header) + 1, header.encode(), writer)
    large = begin(upload, "PUT", len(data), data[:-1])
    time.sleep(1)
    tokens.remove(file, "ci")
    for connection, last in ((commits, b"\n"), (large, data[-1:])):  # which began before
        connection.sendall(last)
        assert connection.recv(100).startswith(b"HTTP/1.1 401")
    for response in running:
        with pytest.raises(requests.exceptions.ChunkedEncodingError, match="IncompleteRead"):
            list(response.iter_content(1 << 20))
    unknown = begin(f"{hub.url}/api/kernels/a/one/preupload/main", "POST", 1000, b"{", "unknown")
    assert unknown.recv(100).startswith(b"HTTP/1.1 401")  # its body is not awaited
    assert requests.put(upload, data=data).status_code == 401
    assert requests.get(download).status_code == 401
    assert requests.get(download.replace(tokens.TokenFile(file).tokens()[0].sha256[:4], "x")).status_code in {401, 403}
    for sent in ("", "x", "Digest x", "Bearer", "Basic Og=="):  # no way around the limit of requests without a token
        assert requests.get(f"{hub.url}/api/kernels", headers={"Authorization": sent}, timeout=10).status_code == 401
    assert requests.get(address("download", other), timeout=10).content == data


def test_a_pull_request_is_for_a_branch(api: HfApi) -> None:
    head = str(api.repo_info("a/one", repo_type="kernel").sha)
    api.create_tag("a/one", tag="t", repo_type="kernel")

    assert commit(api, "a/one", "x", create_pr=True).pr_num == 1
    for revision in (head, "t", "refs/pr/1", "refs/tags/t"):
        with pytest.raises(HfHubHTTPError, match="no branch"):
            commit(api, "a/one", "y", create_pr=True, revision=revision)


def test_answers_do_not_wait_for_acknowledgments() -> None:
    """Without TCP_NODELAY, each answer after the first of a connection takes 40 ms."""

    async def first_connection() -> int:
        accepted = asyncio.get_running_loop().create_future()
        with listen("127.0.0.1", 0) as listening:
            async with await asyncio.start_server(lambda _, writer: accepted.set_result(writer), sock=listening):
                with socket.create_connection(listening.getsockname()):
                    return (await accepted).get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    assert asyncio.run(first_connection()) == 1


def test_a_lookup_of_many_paths_reads_each_folder_once(hub: RunningHub, api: HfApi) -> None:
    git = pygit2.Repository(str(hub.root / "repositories/a/one.git"))
    folder, top, blob = git.TreeBuilder(), git.TreeBuilder(), git.create_blob(b"x" * 130)
    for number in range(100_000):
        folder.insert(f"f{number}", blob, pygit2.enums.FileMode.BLOB)
    for name in ("a", "b"):
        top.insert(name, folder.write(), pygit2.enums.FileMode.TREE)
    head, who = git.references["refs/heads/main"], pygit2.Signature("a", "a@b")
    git.create_commit("refs/heads/main", who, who, "m", top.write(), [head.target])
    paths = [f"{'ab'[number % 2]}/f{number}{'/none' * (number % 3)}" for number in range(999)]
    process = psutil.Process(hub.process.pid)
    before = sum(process.cpu_times())
    found = requests.post(f"{hub.url}/api/kernels/a/one/paths-info/main", data={"paths": paths}, headers=TOKEN)
    assert len(found.json()) == 333
    files = {"files": [{"path": path, "size": 1} for path in paths]}
    assert requests.post(f"{hub.url}/api/kernels/a/one/preupload/main", json=files, headers=TOKEN).ok
    assert sum(process.cpu_times()) - before < 3
    before = sum(process.cpu_times())
    assert all(requests.get(f"{hub.url}/kernels/a/one", headers=TOKEN).ok for _ in range(10))
    assert sum(process.cpu_times()) - before < 2.5


# .gitignore


def test_gitignore_counts_in_uploads(api: HfApi, tmp_path: Path) -> None:
    files = dict.fromkeys(("a.log", "keep.log", "build/x", "a/b/node_modules/c", "sub/top", "top"), "x")
    rules = "# of a build\n*.log\n!keep.log\nbuild/\n/top\n**/node_modules\n"
    write_files(tmp_path / "up", {**files, ".gitignore": rules})
    api.upload_folder(repo_id="a/one", folder_path=tmp_path / "up", repo_type="kernel")
    expected = {".gitignore", "keep.log", "sub/top"}
    assert set(api.list_repo_files("a/one", repo_type="kernel")) == expected
    # Later uploads follow the .gitignore of the repository.
    api.upload_file(path_or_fileobj=b"x", path_in_repo="later.log", repo_id="a/one", repo_type="kernel")
    assert set(api.list_repo_files("a/one", repo_type="kernel")) == expected


def test_rules_that_take_git_hours_are_refused() -> None:
    start = time.process_time()
    for rule, path in (("**/a/" * 16 + "b", "a/" * 31 + "c"), ("*a*/" * 8 + "b", "/".join(["a" * 100] * 9 + ["c"]))):
        with pytest.raises(Refusal, match="too long"):
            ignored(rule.encode(), [path])
    paths = ["/".join(["a" * 250] * 3) + f"{number}" for number in range(30)]
    assert ignored((b"*" + b"a" * 60 + b"b\n") * 1030, paths) == set()
    assert time.process_time() - start < 1, "other requests wait meanwhile"
    assert ignored(b"*.log\n!b.log\n", [":!a.log", "b.log"]) == {":!a.log"}


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


def test_pages_show_the_newest_versions(hub: RunningHub, api: HfApi) -> None:
    git = pygit2.Repository(str(hub.root / "repositories/a/one.git"))
    for number in range(1, 200):
        git.references.create(f"refs/heads/v{number}", git.references["refs/heads/main"].target)
    api.create_branch("a/one", branch="v200", repo_type="kernel")
    for path, oldest in (("", 191), ("kernels/a/one", 101)):
        page = requests.get(f"{hub.url}/{path}").text
        assert ">v200<" in page and f">v{oldest}<" in page and f">v{oldest - 1}<" not in page


def test_the_index_is_rebuilt_at_the_start_and_by_check(start_hub: Callable[..., RunningHub], tmp_path: Path) -> None:
    hub = start_hub()
    for name in ("a/one", "a/gone"):
        hub.api().create_repo(name, repo_type="kernel")
    hub.kill()
    # As if the server had been killed after it had moved a ref, and deleted a repository.
    shutil.rmtree(hub.root / "repositories/a/gone.git")
    git = pygit2.Repository(str(hub.root / "repositories/a/one.git"))
    who = pygit2.Signature("a", "a@b")

    def move() -> str:
        parent = git.references["refs/heads/main"].peel(pygit2.Commit)
        return str(git.create_commit("refs/heads/main", who, who, "m", parent.tree_id, [parent.id]))

    moved = move()
    again = start_hub()
    assert [item["sha"] for item in requests.get(f"{again.url}/api/kernels").json()] == [moved]
    moved = move()
    opened = Hub(Settings(hub.root))
    assert not list(maintenance.find_defects(opened))
    (one,) = opened.index.page(None, count=9)
    assert one.commit == moved
    (hub.root / "repositories/a/one.git/objects/new").write_bytes(bytes(9000))
    for names in (("a/one", "b/two"), ("b/two", "a/one")):  # renamed without reading all files, which others wait for
        opened.repositories.move(*names)
        assert opened.index.page(None, count=9) == [replace(one, repo_id=names[1], organization=names[1][0])]
    again.kill()
    (hub.root / "index.sqlite").write_bytes(b"damaged" * 1000)
    with pytest.raises(HubError, match="the index cannot be used"):
        Hub(Settings(hub.root))
    (hub.root / "index.sqlite").unlink()
    assert requests.get(f"{start_hub().url}/api/kernels").json()[0]["sha"] == moved


def test_a_repository_that_cannot_be_read_counts_in_the_quota(tmp_path: Path) -> None:
    hub = Hub(Settings(tmp_path))
    hub.repositories.create("a/one", private=False, author="a")
    repository = hub.repositories.open("a/one")
    with hub.large_files.receive() as incoming:
        incoming.write(bytes(1 << 20))
        incoming.seal()
        hub.keep(repository, [incoming])
    stored = hub.index.stored_bytes()
    assert stored > 1 << 20
    git = pygit2.Repository(str(repository.path))
    head, who, blob = git.references["refs/heads/main"], pygit2.Signature("a", "a@b"), git.create_blob(b"")
    changes = [FileChange(f"{number:0207}", str(blob)) for number in range(10_000)]
    with pytest.raises(Refusal, match="use more folders"):
        repository.commits.create("main", changes, title="t", description="", author="a")
    top = git.TreeBuilder()
    for number in range(40_000):
        top.insert(f"{number:0207}", blob, pygit2.enums.FileMode.BLOB)
    pushed = str(git.create_commit("refs/heads/main", who, who, "by git push", top.write(), [head.target]))
    hub.index.refresh("a/one")
    assert hub.index.is_public("a/one") and hub.index.stored_bytes() == stored
    (repository.path / "objects" / pushed[:2] / pushed[2:]).unlink()
    hub.index.refresh("a/one")
    assert hub.index.twin("A/one") == "a/one" and hub.index.stored_bytes() == stored
    (tmp_path / "index.sqlite").unlink()
    hub = Hub(Settings(tmp_path))
    hub.index.read_all(hub.repositories)
    assert hub.index.stored_bytes() > 1 << 20 and not hub.index.is_public("a/one")
    shutil.rmtree(repository.path)
    hub.index.refresh("a/one")
    assert hub.index.find("a/one") is None


@pytest.mark.parametrize("wait", [0.2, 100])
def test_a_clone_ends_when_its_client_reads_slowly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait: float
) -> None:
    app = create_app(Settings(tmp_path))
    app.state.hub.repositories.create("a/one", private=False, author="a")
    large = pygit2.Repository(str(tmp_path / "repositories/a/one.git")).create_blob(os.urandom(1_000_000))
    body = f"0011command=fetch00010032want {large}\n0009done\n0000".encode()
    monkeypatch.setattr(git, "SPARE_SECONDS", 1)
    monkeypatch.setattr(git, "SLOWEST", 4 << 20)
    received = 0

    async def read(data: bytes) -> None:
        nonlocal received
        if len(data) > 10_000:  # a block of the pack
            await anyio.sleep(wait)
        received += len(data)

    async def clone_often() -> None:
        headers = {"content-type": "application/x-git-upload-pack-request", "git-protocol": "version=2"}
        for _ in range(3):  # no turn is lost
            with anyio.fail_after(60):
                await ask(app, "/kernels/a/one/git-upload-pack", body=body, headers=headers, read=read)

    anyio.run(clone_often)
    assert received < 3 * 500_000 and (received > 60_000 or wait == 100)


# Cards: little Markdown that stands for much HTML, or takes long to parse or to clean

COSTLY_CARDS = {
    "rows without the cells of the head": "|" + "a|" * 300 + "\n|" + "-|" * 300 + "\n" + "a\n" * 9000,
    "many tables": ("|" + "a|" * 60 + "\n|" + "-|" * 60 + "\n" + "a\n" * 60 + "\n") * 85,
    "quotes": "> " * 16_000,
    "open elements": "<blockquote>" * 2700,
    "images": "![" * 16_000,
    "ampersands": "&a;" * 10_000,
    "unclosed tags": "<div><p>" + "".join(f"<b id={n}>" for n in range(1250)) + "<p>x" * 3500,
}


def test_costly_cards_are_small_pages(hub: RunningHub) -> None:
    for number, card in enumerate(COSTLY_CARDS.values()):
        hub.api().create_repo(f"a/card{number}", repo_type="kernel")
        commit(hub.api(), f"a/card{number}", "README.md", card.encode())
    before = memory(hub)
    with ThreadPoolExecutor(12) as pool:
        pages = list(pool.map(requests.get, [f"{hub.url}/kernels/a/card{n}" for n in range(len(COSTLY_CARDS))] * 4))
    assert {page.status_code for page in pages} == {200}
    assert max(len(page.content) for page in pages) < 100_000
    assert ["is too large to show here" in page.text for page in pages[:3]] == [True] * 3
    assert memory(hub) - before < 150
    metadata = json.dumps({"backend": {"archs": ["9.9"]}, "x": [[]] * 15_000})
    header, *_ = commit_body("x", "x").splitlines()
    lines = [header, *(commit_body(f"build/t{n}/metadata.json", metadata).splitlines()[1] for n in range(40))]
    assert requests.post(f"{hub.url}/api/kernels/a/card0/commit/main", data="\n".join(lines), headers=TOKEN).ok
    assert 5 < requests.get(f"{hub.url}/kernels/a/card0").text.count("9.9") < 10  # 512 KB of it


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "kernels/a/one/commit/main", commit_body("x", "x")),
        ("POST", "kernels/a/one/branch/v1", "{}"),
        ("PUT", "kernels/a/one/settings", '{"private": true}'),
        ("POST", "repos/move", '{"fromRepo": "a/one", "toRepo": "a/two", "type": "kernel"}'),
        ("DELETE", "repos/delete", '{"organization": "a", "name": "one", "type": "kernel"}'),
        ("POST", "repos/create", '{"organization": "a", "name": "two", "type": "kernel"}'),
    ],
)
def test_a_token_that_is_removed_while_its_change_waits_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, path: str, body: str
) -> None:
    file = tmp_path / "tokens.json"
    token = tokens.add(file, "a", read=(), write=("a",))
    app = create_app(Settings(tmp_path / "hub", token_file=file))
    app.state.hub.repositories.create("a/one", private=False, author="a")
    before = app.state.hub.index.find("a/one")

    def locked_late(lock: Path, **options: Any) -> AbstractContextManager[None]:
        if tokens.TokenFile(file).tokens():
            tokens.remove(file, "a")
        return locked(lock, **options)

    monkeypatch.setattr("kernel_hub.storage.disk.locked", locked_late)
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    answer = TestClient(app).request(method, f"/api/{path}", content=body, headers=headers)
    assert answer.status_code == 401 and list(app.state.hub.repositories) == ["a/one"]
    assert app.state.hub.index.find("a/one") == before
