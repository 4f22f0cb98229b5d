"""Requests that keep Python busy: the folders that they read, and how many of a caller run at once."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pygit2
import pytest
import requests
from huggingface_hub import HfApi
from raw_requests import TOKEN, ask, commit_body, until
from starlette.testclient import TestClient

from kernel_hub import tokens
from kernel_hub.app import create_app
from kernel_hub.git.objects import FileChange
from kernel_hub.git.repository import GitRepository
from kernel_hub.http.turns import current_request
from kernel_hub.hub_service import Hub
from kernel_hub.refusals import Refusal
from kernel_hub.repositories.index import IndexedRepository
from kernel_hub.repositories.store import RepositoryStore
from kernel_hub.routes import git
from kernel_hub.settings import Settings
from kernel_hub.storage.disk import LOCK_SECONDS, repository_lock
from kernel_hub.storage.large_files import LargeFiles
from kernel_hub.tokens import Caller
from tests.support.running_hub import RunningHub

pytestmark = pytest.mark.attack


def test_only_shown_folders_are_read(hub: RunningHub, api: HfApi) -> None:
    files = ["a-", "a.b/x", *(f"a/{number:04}" for number in range(1100)), "a/x/y/z", "a0", "b/x", "c/x"]
    header = commit_body("x", "x").splitlines()[0]
    url = f"{hub.url}/api/kernels/a/one"
    add = [commit_body(path, path).splitlines()[1] for path in files]
    assert requests.post(f"{url}/commit/main", data="\n".join([header, *add]), headers=TOKEN).ok
    listed = [item.path for item in api.list_repo_tree("a/one", recursive=True, repo_type="kernel")]
    folders = {"a.b", "a", "a/x", "a/x/y", "b", "c"}
    assert [path for path in listed if path not in folders] == files and len(listed) == len(files) + len(folders)
    git = pygit2.Repository(str(hub.root / "repositories/a/one.git"))
    full = git.references["refs/heads/main"].peel(pygit2.Commit)
    delete = [json.dumps({"key": "deletedFolder", "value": {"path": path}}) for path in ("a", "b")]
    done = requests.post(f"{url}/commit/main", data="\n".join([header, *delete]), headers=TOKEN)
    oid = str(full.tree["b"].id)
    Path(git.path, "objects", oid[:2], oid[2:]).unlink()  # so that it cannot be read
    page = requests.get(f"{hub.url}/kernels/a/one/commit/{done.json()['commitOid']}", headers=TOKEN)
    assert page.ok and page.text.count("<li>") == 1000 and "More than 1000 files" in page.text
    for cursor, is_read in (("a/1098", False), ("c/", True)):
        answer = requests.get(f"{url}/tree/{full.id}", params={"recursive": "true", "cursor": cursor}, headers=TOKEN)
        assert answer.ok == is_read
    assert [item["path"] for item in answer.json()] == ["c/x"]


@pytest.mark.parametrize(
    ("path", "most"),
    [
        ("/kernels/a/one/commit/main", 1),
        ("/kernels/a/one", 1),
        ("/api/kernels/a/one/tree/main", 1),
        ("/api/kernels/a/one/commits/main", 1),
        ("/api/kernels/a/one/refs", 1),
        ("/api/kernels/a/one", 8),
        ("/kernels/a/one/resolve/main/.gitattributes", 8),
    ],
)
def test_callers_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, most: int) -> None:
    file = tmp_path / "tokens.json"
    sent = {name: tokens.add(file, name, read=(), write=(name,)) for name in ("a", "foreign")}
    app = create_app(Settings(tmp_path / "hub", token_file=file))
    app.state.hub.repositories.create("a/one", private=False, author="a")
    running: Counter[str] = Counter()
    largest: Counter[str] = Counter()
    victims, waited = ["a", "192.0.2.1"], list[str]()  # the others hold their turns until these were served
    read = Hub.to_read

    def counted(hub: Hub, repo_id: str, caller: Caller) -> GitRepository:
        name = caller.name or current_request.get().scope["client"][0][:9]
        running[name] += 1
        largest[name] = max(largest[name], running[name])
        if name in victims:
            victims.remove(name)
        elif not until(lambda: not victims or waited):
            waited.append(name)
        running[name] -= 1
        return read(hub, repo_id, caller)

    async def ask_often() -> None:
        async with anyio.create_task_group() as tasks:
            for number in range(20):  # of one network
                tasks.start_soon(partial(ask, app, path, address=f"2001:db8:0:{number}::1"))
                tasks.start_soon(ask, app, path, sent["foreign"])
            tasks.start_soon(ask, app, path, sent["a"])
            tasks.start_soon(partial(ask, app, path, address="192.0.2.1"))

    monkeypatch.setattr(Hub, "to_read", counted)
    anyio.run(ask_often)
    assert max(largest.values(), default=0) <= most, largest
    assert not waited, "an owner or another address waited for all others"


def test_no_caller_waits_for_the_locks_of_another(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    owner, other = (tokens.add(file, name, read=(), write=(name,)) for name in ("a", "foreign"))
    app = create_app(Settings(tmp_path / "hub", token_file=file))
    for repo_id in ("a/one", "foreign/one"):
        app.state.hub.repositories.create(repo_id, private=False, author="a")
    body = commit_body("x", "x").encode()

    async def ask_often() -> None:
        async with anyio.create_task_group() as tasks:
            with repository_lock(tmp_path / "hub/repositories/foreign/one.git", "foreign/one"):
                for _ in range(70):
                    tasks.start_soon(partial(ask, app, "/api/kernels/foreign/one/commit/main", other, body=body))
                await anyio.sleep(2)
                with anyio.fail_after(LOCK_SECONDS - 10):
                    await ask(app, "/api/kernels/a/one", owner)
                    await ask(app, "/api/kernels/a/one/commit/main", owner, body=body)
                    await ask(app, "/kernels/a/one/resolve/main/x")
                tasks.cancel_scope.cancel()

    anyio.run(ask_often)


def test_no_caller_waits_while_the_repository_of_another_is_read(tmp_path: Path) -> None:
    hub = Hub(Settings(tmp_path))
    for repo_id in ("a/one", "foreign/one"):
        hub.repositories.create(repo_id, private=False, author="a")
    before, indexed = hub.index.find("foreign/one"), hub.index._read
    create_branch = hub.repositories.open("a/one").refs.create_branch

    def read(repo_id: str, known: IndexedRepository | None, measure: bool) -> IndexedRepository | None:
        row = indexed(repo_id, known, measure)
        if known == before:  # the first time: a repository of very many branches
            with ThreadPoolExecutor(1) as other:
                other.submit(create_branch, "v1", None, overwrite=False).result(10)
                other.submit(hub.index.grow, "foreign/one", 5)
                other.submit(hub.index.hide, "foreign/one")  # it is read again, as a public one
        return row

    hub.index._read = read
    hub.index.refresh("foreign/one")
    assert before is not None and hub.index.find("foreign/one") == replace(before, bytes=before.bytes + 5)


def test_no_upload_waits_while_the_files_of_all_repositories_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(Settings(tmp_path))
    for repo_id in ("a/one", "a/two", "b/three", "foreign/one"):
        hub.repositories.create(repo_id, private=False, author="a")

    def store(repo_id: str, *contents: bytes) -> str:
        with ExitStack() as staged:
            files = [staged.enter_context(hub.large_files.receive()) for _ in contents]
            for file, content in zip(files, contents, strict=True):
                file.write(content)
                file.seal()
            hub.keep(hub.repositories.open(repo_id), files)
            return files[0].sha256

    shared, late, alone = (store("foreign/one", content) for content in (b"x", b"y", b"z"))
    store("b/three", b"x")
    repo_ids, adopt = RepositoryStore.__iter__, LargeFiles.adopt

    def listed(store_of_all: RepositoryStore) -> Iterator[str]:
        for number, repo_id in enumerate(repo_ids(store_of_all)):
            if number == 0:  # another request, while the owners are searched
                with ThreadPoolExecutor(1) as other:
                    other.submit(store, "a/one", b"y").result(10)
            yield repo_id

    monkeypatch.setattr(RepositoryStore, "__iter__", listed)
    monkeypatch.setattr("kernel_hub.storage.disk.LOCK_SECONDS", 2)
    hub.repositories.delete("foreign/one")
    assert [hub.large_files.size(sha256) for sha256 in (shared, late, alone)] == [1, 1, None]
    portions = []
    monkeypatch.setattr(LargeFiles, "adopt", lambda *args: adopt(*args) or portions.append(len(args[1])))
    store("a/two", *(b"%d" % number for number in range(250)))
    assert max(portions) < 200 and sum(portions) == 250, "all other uploads wait"


def test_many_small_folders_are_not_read_in_one_request(tmp_path: Path) -> None:
    hub = Hub(Settings(tmp_path))
    hub.repositories.create("a/one", private=False, author="a")

    def write(base: str, text: bytes, **options: bool) -> str:
        repository = hub.repositories.open("a/one")
        blob = repository.commits.write_blob(text)
        changes = [FileChange(f"{base}{number}/{base}{number}", blob) for number in range(1500)]
        return repository.commits.create("main", changes, title="t", description="", author="a", **options)[0]

    paths = [f"{base}{number}/{base}{number}" for base in "ab" for number in range(1500)]
    for base in "ab":
        head = write(base, b"x")
    assert len(hub.repositories.open("a/one").revisions.find_all(head, paths[:1900])) == 1900
    with pytest.raises(Refusal, match="more than 2048 folders"):
        hub.repositories.open("a/one").revisions.find_all(head, paths)
    reviewed = write("a", b"y", pull_request=True)  # which still can be merged
    assert hub.repositories.open("a/one").commits.merge(1, reviewed, "a", lambda _: None) == reviewed
    reviewed = write("a", b"z", pull_request=True)
    write("b", b"z")
    hub.repositories.open("a/one").commits.merge(2, reviewed, "a", lambda _: None)


def test_a_repository_that_is_read_while_it_is_made_private_is_not_listed(tmp_path: Path) -> None:
    app = create_app(Settings(tmp_path))
    hub = app.state.hub
    hub.repositories.create("a/one", private=False, author="a")
    hub.index.hide("a/one")  # as an earlier request
    reads, indexed = list[bool](), hub.index._read

    def read(*args: Any) -> IndexedRepository | None:
        row = indexed(*args)
        reads.append(row.private)
        if reads == [False]:  # a server that starts reads it for long
            with ThreadPoolExecutor(1) as other:
                client, body = TestClient(app, base_url="http://localhost"), {"private": True}
                answer = other.submit(client.put, "/api/kernels/a/one/settings", json=body, headers=TOKEN).result(10)
                assert answer.status_code == 200
        return row

    hub.index._read = read
    hub.index.refresh("a/one", measure=True)
    assert not hub.index.is_public("a/one")


def test_a_caller_with_more_clones_than_its_part_ends_when_others_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = create_app(Settings(tmp_path))
    app.state.hub.repositories.create("a/one", private=False, author="a")
    large = pygit2.Repository(str(tmp_path / "repositories/a/one.git")).create_blob(os.urandom(9_000_000))
    body = f"0011command=fetch00010032want {large}\n0009done\n0000".encode()
    headers = {"content-type": "application/x-git-upload-pack-request", "git-protocol": "version=2"}
    monkeypatch.setattr(git, "SHARED_SECONDS", 1)
    monkeypatch.setattr(git, "SLOWEST", 1)

    async def clone(address: str, seconds: float) -> None:
        async def read(data: bytes) -> None:
            await anyio.sleep(seconds if len(data) > 10_000 else 0)

        await ask(app, "/kernels/a/one/git-upload-pack", address=address, body=body, headers=headers, read=read)

    async def clone_often() -> None:
        async with anyio.create_task_group() as tasks:
            for number in range(8):  # of four addresses, for as long as they like
                tasks.start_soon(clone, f"192.0.2.{number // 2 + 2}", 0.5)
            while app.state.turns["clone"].places[False].available_tokens:
                await anyio.sleep(0.01)
            with anyio.fail_after(20):
                await clone("192.0.2.1", 0)
            assert app.state.turns["clone"].places[False].borrowed_tokens == 7  # one has ended, all others go on
            tasks.cancel_scope.cancel()

    anyio.run(clone_often)
