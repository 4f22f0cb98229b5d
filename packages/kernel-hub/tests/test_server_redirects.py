"""Names that repositories had before they were moved."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import requests
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

from kernel_hub import tokens
from tests.support.running_hub import RunningHub
from tests.support.small_kernel import write_kernel
from tests.support.torch_process import run_with_torch

OLD, NEW = "kernels-community/twice", "b/two"


def commit(api: HfApi, repo_id: str, path: str, content: bytes = b"x") -> str:
    change = [CommitOperationAdd(path, content)]
    return str(api.create_commit(repo_id, change, commit_message=path, repo_type="kernel").oid)


def python(hub: RunningHub, code: str, *arguments: str, **environment: str) -> str:
    done = run_with_torch(code, *arguments, **{**hub.environment, **environment})
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


_UPLOAD = """
import sys
from huggingface_hub import HfApi
api = HfApi()
repo_id, folder = sys.argv[1:]
api.create_repo(repo_id, repo_type="kernel", exist_ok=True)
api.create_branch(repo_id, branch="v1", repo_type="kernel", exist_ok=True)
api.upload_folder(repo_id=repo_id, folder_path=folder, repo_type="kernel", revision="v1")
"""


def test_clients_read_and_write_by_the_old_name(hub: RunningHub, tmp_path: Path) -> None:
    api = hub.api()
    folder = write_kernel(tmp_path / "one")
    python(hub, _UPLOAD, OLD, str(folder))
    api.move_repo(OLD, "b/between", repo_type="kernel")
    api.move_repo("b/between", NEW, repo_type="kernel")
    load = f"import torch, kernels; print(kernels.get_kernel('{OLD}', version=1).twice(torch.ones(1)).item())"
    assert python(hub, load) == "2.0\n"
    for transfer in ("xet", "lfs"):
        (folder / "build" / f"{transfer}.bin").write_bytes(os.urandom(1_200_000))
        python(hub, _UPLOAD, OLD, str(folder), HF_HUB_DISABLE_XET=str(int(transfer == "lfs")))
        got = api.hf_hub_download(
            OLD, f"build/{transfer}.bin", revision="v1", repo_type="kernel", cache_dir=tmp_path / "cache"
        )
        assert Path(got).read_bytes() == (folder / "build" / f"{transfer}.bin").read_bytes()
    assert api.repo_info("b/between", repo_type="kernel").id == NEW
    assert not (hub.root / "repositories" / f"{OLD}.git").exists()
    oid = commit(api, OLD, "π=1 %2F#?.py")
    wanted = api.create_commit(
        OLD, [CommitOperationAdd("pr", b"x")], commit_message="m", repo_type="kernel", create_pr=True
    )
    assert api.file_exists(OLD, "pr", revision=wanted.pr_revision, repo_type="kernel")  # refs%2Fpr%2F1 stays encoded
    assert api.file_exists(OLD, "π=1 %2F#?.py", repo_type="kernel", revision=oid)
    assert {item.path for item in api.get_paths_info(OLD, ["pr", "build"], revision="refs/pr/1", repo_type="kernel")}
    page = requests.get(f"{hub.url}/kernels/{OLD}", headers={"Accept": "text/html"})
    assert page.url == f"{hub.url}/kernels/{NEW}" and page.history[0].status_code == 307
    for name in (OLD, f"{OLD}.git"):
        clone = ["git", "clone", "-q", f"{hub.url}/kernels/{name}", str(tmp_path / name.replace("/", "-"))]
        subprocess.run(clone, check=True, capture_output=True, env={**os.environ, "GIT_LFS_SKIP_SMUDGE": "1"})


def test_who_has_a_name(start_hub: Callable[..., RunningHub]) -> None:
    hub = start_hub()
    api = hub.api()
    api.create_repo("a/one", repo_type="kernel")
    api.move_repo("a/one", "a/two", repo_type="kernel")
    # A job that knows the old name goes on with the moved repository, and does not make a second one.
    with pytest.raises(HfHubHTTPError, match="redirects to a/two"):
        api.create_repo("a/one", repo_type="kernel")
    api.create_repo("a/one", repo_type="kernel", exist_ok=True)
    commit(api, "a/one", "by-the-old-name")
    assert api.file_exists("a/two", "by-the-old-name", repo_type="kernel")
    with pytest.raises(HfHubHTTPError, match="a/one is now a/two"):
        api.move_repo("a/one", "a/three", repo_type="kernel")
    # Deleting the old name ends the redirect, and touches nothing else.
    api.delete_repo("a/one", repo_type="kernel")
    assert api.repo_exists("a/two", repo_type="kernel") and not api.repo_exists("a/one", repo_type="kernel")
    api.create_repo("a/one", repo_type="kernel")
    assert api.repo_info("a/one", repo_type="kernel").id == "a/one"
    # The last repository that had a name is found by it, also after the index was built anew.
    api.move_repo("a/one", "a/later", repo_type="kernel")
    commit(api, "a/two", "f")
    assert api.repo_info("a/one", repo_type="kernel").id == "a/later"
    hub.stop()
    (hub.root / "index.sqlite").unlink()
    again = start_hub()
    api = again.api()
    assert api.repo_info("a/one", repo_type="kernel").id == "a/later"
    api.move_repo("a/later", "a/one", repo_type="kernel")  # back
    assert api.repo_info("a/one", repo_type="kernel").id == api.repo_info("a/later", repo_type="kernel").id == "a/one"
    api.delete_repo("a/one", repo_type="kernel")
    for name in ("a/one", "a/later"):
        assert not api.repo_exists(name, repo_type="kernel")


def test_a_redirect_shows_no_private_repository(start_hub: Callable[..., RunningHub], tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    root = tokens.add(file, "root", read=(), write=("*",))
    old = tokens.add(file, "old", read=(), write=("a",))
    hub = start_hub("--token-file", str(file), "--audit-log", str(tmp_path / "audit.log"))
    api = hub.api(root)
    api.create_repo("a/one", repo_type="kernel", private=True)
    api.move_repo("a/one", "b/two", repo_type="kernel")
    assert api.repo_info("a/one", repo_type="kernel").id == "b/two"
    for token in (old, None):
        with pytest.raises(RepositoryNotFoundError):
            hub.api(token).repo_info("a/one", repo_type="kernel")
        absent, moved = (
            requests.get(f"{hub.url}/api/kernels/a/{name}", allow_redirects=False) for name in ("no", "one")
        )
        assert moved.status_code == absent.status_code == 404 and "b/two" not in moved.text
    hub.api(old).create_repo("a/one", repo_type="kernel")  # the name is theirs
    assert api.repo_info("a/one", repo_type="kernel").id == "a/one"
