"""Retention: the space that `kernel-hub gc` frees."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from huggingface_hub import CommitOperationAdd, HfApi

from kernel_builder.cli import main
from kernel_hub import repair
from kernel_hub.hub_service import Hub
from kernel_hub.settings import Settings
from tests.support.running_hub import RunningHub

pytestmark = pytest.mark.attack


def commit(api: HfApi, repo_id: str, revision: str = "main", **files: bytes) -> str:
    changes = [CommitOperationAdd(f"build/{name}", content) for name, content in files.items()]
    done = api.create_commit(repo_id, changes, commit_message="m", repo_type="kernel", revision=revision)
    return str(done.oid)


def git(hub: RunningHub, repo_id: str, *command: str) -> str:
    where = ["git", "-c", "safe.directory=*", "-C", str(hub.root / f"repositories/{repo_id}.git")]
    return subprocess.run([*where, *command], capture_output=True, text=True, check=True).stdout


def stored(hub: RunningHub) -> set[str]:
    return {path.name for path in (hub.root / "large").rglob("*") if path.is_file()}


def in_an_hour(root: Path) -> list[repair.Defect]:
    return list(repair.find_defects(Hub(Settings(root)), now=time.time() + 3600))


def gc(hub: RunningHub, *options: str) -> dict[str, Any]:
    done = CliRunner().invoke(main, ["hub", "gc", "--root", str(hub.root), "--json", *options])
    assert done.exit_code == 0, done.output
    return dict(json.loads(done.stdout))


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
    assert gc(hub) == {"freed": [], "bytes": 0} and in_an_hour(hub.root) == []
    for repo_id, name in (("a/one", "kept"), ("b/two", "shared")):
        assert api.hf_hub_download(repo_id, f"build/{name}", repo_type="kernel", cache_dir=tmp_path / "cache")
        git(hub, repo_id, "fsck", "--strict")
    sizes = [item.bytes for item in Hub(Settings(hub.root)).index.page(None, count=9)]
    assert all(1_200_000 < size < 1_300_000 for size in sizes), sizes


def test_gc_keeps_files_that_are_being_published_again(hub: RunningHub, tmp_path: Path) -> None:
    """A client does not send a stored file again, and commits it now."""
    api = hub.api()
    api.create_repo("a/one", repo_type="kernel")
    api.create_branch("a/one", branch="v1", repo_type="kernel")
    (tmp_path / "table").write_bytes(os.urandom(1_200_000))
    code = f"""
import sys
from huggingface_hub import CommitOperationAdd, HfApi
api = HfApi(library_name='kernel-builder')  # uploads by LFS
added = CommitOperationAdd("table", "{tmp_path}/table")
api.preupload_lfs_files("a/one", [added], repo_type="kernel", revision="v1")
print("sent", flush=True)
sys.stdin.readline()
api.create_commit("a/one", [added], commit_message="m", repo_type="kernel", revision=sys.argv[1])
"""
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
