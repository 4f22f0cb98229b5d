"""Retention: large files that are permanently deleted, and the space that `hub gc` frees."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests
from click.testing import CliRunner
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

from kernel_builder.cli import main
from kernel_hub import mend, retention, tokens
from kernel_hub.hub_service import Hub
from kernel_hub.settings import Settings
from tests.support.running_hub import RunningHub


def commit(api: HfApi, repo_id: str, revision: str = "main", **files: bytes) -> str:
    changes = [CommitOperationAdd(f"build/{name}", content) for name, content in files.items()]
    done = api.create_commit(repo_id, changes, commit_message="m", repo_type="kernel", revision=revision)
    return str(done.oid)


def git(hub: RunningHub, repo_id: str, *command: str) -> str:
    where = ["git", "-c", "safe.directory=*", "-C", str(hub.root / f"repositories/{repo_id}.git")]
    return subprocess.run([*where, *command], capture_output=True, text=True, check=True).stdout


def stored(hub: RunningHub) -> set[str]:
    return {path.name for path in (hub.root / "large").rglob("*") if path.is_file()}


def in_an_hour(root: Path) -> list[mend.Defect]:
    return list(mend.find_defects(Hub(Settings(root)), now=time.time() + 3600))


def test_large_files_are_deleted_from_the_whole_history(start_hub: Callable[..., RunningHub], tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    writer = tokens.add(file, "ci", read=(), write=("a",))
    reader = tokens.add(file, "desk", read=("a",), write=())
    hub = start_hub("--token-file", str(file))
    api = hub.api(writer)
    api.create_repo("a/one", repo_type="kernel")
    secret, kept = os.urandom(1_200_000), os.urandom(1_300_000)
    commit(api, "a/one", before=b"before")
    wrong = commit(api, "a/one", secret=secret, kept=kept)
    api.create_tag("a/one", tag="plain", repo_type="kernel")
    api.create_tag("a/one", tag="annotated", tag_message="Words", repo_type="kernel")
    api.create_branch("a/one", branch="v1", repo_type="kernel")
    first = api.list_repo_commits("a/one", repo_type="kernel")[-1].commit_id
    api.create_branch("a/one", branch="old", revision=first, repo_type="kernel")
    change = [CommitOperationDelete("build/secret"), CommitOperationAdd("after", b"after")]
    api.create_commit("a/one", change, commit_message="after", repo_type="kernel", revision="main")
    before = api.list_repo_commits("a/one", repo_type="kernel")
    untouched = api.repo_info("a/one", revision="old", repo_type="kernel").sha

    listed = {item.filename: item for item in api.list_lfs_files("a/one", repo_type="kernel")}
    with pytest.raises(HfHubHTTPError, match="may only read a/one"):
        hub.api(reader).permanently_delete_lfs_files("a/one", [listed["build/secret"]], repo_type="kernel")
    stored_before = next(iter(api.list_user_repos())).storage
    api.permanently_delete_lfs_files("a/one", [listed["build/secret"]], repo_type="kernel")
    api.permanently_delete_lfs_files("a/one", [listed["build/secret"]], repo_type="kernel")  # again, as after an error
    assert next(iter(api.list_user_repos())).storage < stored_before - 1_100_000

    assert [item.filename for item in api.list_lfs_files("a/one", repo_type="kernel")] == ["build/kept"]
    for revision in ("main", "v1", "plain", "annotated"):
        assert "build/secret" not in api.list_repo_files("a/one", repo_type="kernel", revision=revision)
        got = api.hf_hub_download(
            "a/one", "build/kept", revision=revision, repo_type="kernel", cache_dir=tmp_path / "c"
        )
        assert Path(got).read_bytes() == kept
    after = api.list_repo_commits("a/one", repo_type="kernel")
    assert [(item.title, item.created_at) for item in after] == [(item.title, item.created_at) for item in before]
    assert after[-2:] == before[-2:] and after[0].commit_id != before[0].commit_id
    assert api.repo_info("a/one", revision="old", repo_type="kernel").sha == untouched
    assert "Words" in git(hub, "a/one", "cat-file", "tag", "annotated")
    git(hub, "a/one", "fsck", "--strict")
    # The old commit is there until `git gc`; its file is not served, also from a new branch.
    api.create_branch("a/one", branch="again", revision=wrong, repo_type="kernel")
    with pytest.raises(EntryNotFoundError):
        api.hf_hub_download("a/one", "build/secret", revision="again", repo_type="kernel", cache_dir=tmp_path / "c")
    assert [defect.what for defect in in_an_hour(hub.root)] == ["no repository owns it"]
    assert len(stored(hub)) == 1
    # What is published again is there again.
    commit(api, "a/one", "again", secret=secret, more=os.urandom(1_100_000))
    assert api.hf_hub_download("a/one", "build/secret", revision="again", repo_type="kernel", cache_dir=tmp_path / "c")
    unknown = requests.post(
        f"{hub.url}/api/kernels/a/one/lfs-files/batch",
        json={"deletions": {"sha": ["0" * 64], "rewriteHistory": True}},
        headers={"Authorization": f"Bearer {writer}"},
    )
    assert unknown.status_code == 400 and "has no large file" in unknown.json()["error"]


def test_pointers_may_stay_in_the_history(hub: RunningHub, tmp_path: Path) -> None:
    api = hub.api()
    for repo_id in ("a/one", "b/two"):
        api.create_repo(repo_id, repo_type="kernel")
    large = os.urandom(1_200_000)
    head = commit(api, "a/one", table=large)
    commit(api, "b/two", table=large)
    listed = list(api.list_lfs_files("a/one", repo_type="kernel"))
    api.permanently_delete_lfs_files("a/one", listed, rewrite_history=False, repo_type="kernel")
    assert api.repo_info("a/one", repo_type="kernel").sha == head
    with pytest.raises(EntryNotFoundError):
        api.hf_hub_download("a/one", "build/table", repo_type="kernel", cache_dir=tmp_path / "cache")
    assert in_an_hour(hub.root) == []  # neither missing nor given back, though the other repository has it
    assert api.hf_hub_download("b/two", "build/table", repo_type="kernel", cache_dir=tmp_path / "cache")
    backup = Path(__file__).parents[3] / "deploy" / "backup.sh"
    subprocess.run([str(backup), str(hub.root), str(tmp_path / "backup")], check=True, capture_output=True)
    assert in_an_hour(tmp_path / "backup") == []


def gc(hub: RunningHub, *options: str) -> dict[str, Any]:
    done = CliRunner().invoke(main, ["hub", "gc", "--root", str(hub.root), "--json", *options])
    assert done.exit_code == 0, done.output
    return dict(json.loads(done.stdout))


def age(hub: RunningHub, days: float) -> None:
    """Make everything that the Hub has stored older."""
    for folder in ("large", "large-xorbs", "repositories"):
        for path in (hub.root / folder).rglob("*"):
            if path.is_file():
                then = path.stat().st_mtime - days * 86400
                os.utime(path, (then, then))


def test_gc_frees_what_no_ref_needs(hub: RunningHub, tmp_path: Path) -> None:
    api = hub.api()
    for repo_id in ("a/one", "a/gone", "b/two"):
        api.create_repo(repo_id, repo_type="kernel")
    api.create_branch("a/one", branch="v1", repo_type="kernel")
    kept, shared, dropped, gone = (os.urandom(1_200_000) for _ in range(4))
    commit(api, "a/one", kept=kept)
    commit(api, "a/one", "v1", dropped=dropped, shared=shared, text=os.urandom(20_000).hex().encode())
    commit(api, "b/two", shared=shared)
    commit(api, "a/gone", gone=gone)
    api.delete_branch("a/one", branch="v1", repo_type="kernel")
    api.delete_repo("a/gone", repo_type="kernel")
    assert gc(hub) == {"freed": [], "bytes": 0}  # all of it is young
    age(hub, 8)
    before = stored(hub)
    planned = gc(hub, "--dry-run")
    assert stored(hub) == before and planned == gc(hub, "--dry-run") and 2_400_000 < planned["bytes"] < 2_500_000
    done = gc(hub)
    objects = [item for item in done["freed"] if item["where"] == "a/one: git objects"]
    assert len(objects) == 1 and objects[0]["size"] > 0
    assert {item["where"] for item in done["freed"]} == {item["where"] for item in planned["freed"]}
    assert len(stored(hub)) == len(before) - 2
    age(hub, 30)
    assert {item["where"].partition(" ")[0] for item in gc(hub)["freed"]} == {"xorb"}
    assert gc(hub) == {"freed": [], "bytes": 0} and in_an_hour(hub.root) == []
    for repo_id, name in (("a/one", "kept"), ("b/two", "shared")):
        assert api.hf_hub_download(repo_id, f"build/{name}", repo_type="kernel", cache_dir=tmp_path / "cache")
        git(hub, repo_id, "fsck", "--strict")
    sizes = {item.id: item.storage for item in api.list_user_repos()}
    assert all(1_200_000 < size < 1_300_000 for size in sizes.values()), sizes


@pytest.mark.parametrize("transfer", ["xet", "lfs"])
def test_gc_leaves_what_is_being_published_again(hub: RunningHub, tmp_path: Path, transfer: str) -> None:
    """A client does not send again what was uploaded long ago, and commits it now."""
    api = hub.api()
    api.create_repo("a/one", repo_type="kernel")
    api.create_branch("a/one", branch="v1", repo_type="kernel")
    (tmp_path / "table").write_bytes(os.urandom(1_200_000))
    code = f"""
import sys
from huggingface_hub import CommitOperationAdd, HfApi
api = HfApi()
added = CommitOperationAdd("table", "{tmp_path}/table")
api.preupload_lfs_files("a/one", [added], repo_type="kernel", revision="v1")
print("sent", flush=True)
sys.stdin.readline()
api.create_commit("a/one", [added], commit_message="m", repo_type="kernel", revision=sys.argv[1])
"""
    environment = {**hub.environment, "HF_HUB_DISABLE_XET": str(int(transfer == "lfs"))}
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


def test_gc_beside_writers(hub: RunningHub) -> None:
    api = hub.api()
    api.create_repo("a/one", repo_type="kernel")
    made: list[str] = []
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            number = len(made)
            content = os.urandom(1_100_000) if number % 6 == 0 else os.urandom(30)
            made.append(commit(hub.api(), "a/one", **{f"f{number}": content}))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        opened = Hub(Settings(hub.root))
        until = time.monotonic() + 30
        while len(made) < 20 and time.monotonic() < until:
            list(retention.collect(opened, unused_seconds=60))
    finally:
        stop.set()
        writer.join()
    assert len(made) >= 20 and set(git(hub, "a/one", "rev-list", "main").split()) >= set(made)
    assert not list(mend.find_defects(opened, digests=True))
