"""The unmodified public clients, in separate processes, against a real Hub on loopback."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import requests
from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationCopy, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError, RevisionNotFoundError

from tests.support.alternating_proxy import alternating_proxy
from tests.support.files import write_files
from tests.support.loopback import write_certificate
from tests.support.places import SOURCES
from tests.support.running_hub import RunningHub
from tests.support.small_kernel import KERNEL, VARIANT, publish_kernel, write_kernel
from tests.support.torch_process import output_with_torch


def python(hub: RunningHub, code: str, home: Path, **environment: str) -> str:
    """Run a program that uses the clients, and return its output."""
    if packages := environment.get("PYTHONPATH"):
        code = f"import sys\nsys.path.insert(0, {packages!r})\n{code}"
    return output_with_torch(code, **{**hub.environment, "HF_HOME": str(home), **environment})


def test_a_published_kernel_loads_through_the_client_and_then_without_a_hub(hub: RunningHub, tmp_path: Path) -> None:
    publish_kernel(hub, write_kernel(tmp_path / "one"))
    publish_kernel(hub, write_kernel(tmp_path / "two", version=2, factor=3), branch="v2")
    publish_kernel(hub, write_kernel(tmp_path / "three", repo_id="others/twice", factor=4), repo_id="others/twice")
    home = tmp_path / "home"
    code = SOURCES["first_load"].format(KERNEL=KERNEL)
    more = SOURCES["later_loads"].format(KERNEL=KERNEL)
    answer = python(hub, code + more, home).split("\n")
    assert answer[:3] == ["2.0", "3.0", "True"]
    assert VARIANT in answer[3]
    assert "not from a trusted publisher" in answer[4] and answer[5] == "4.0"
    # Without a Hub, get_kernel needs a snapshot of the whole branch in the cache.
    python(
        hub,
        f"from huggingface_hub import HfApi\nHfApi().snapshot_download('{KERNEL}', repo_type='kernel', revision='v1')",
        home,
    )
    hub.kill()
    assert python(hub, code, home, HF_HUB_OFFLINE="1") == "2.0"


def test_the_command_line_locks_and_downloads_kernels_that_load_without_a_hub(hub: RunningHub, tmp_path: Path) -> None:
    folder = write_kernel(tmp_path / "one")
    shutil.copytree(folder / "build" / VARIANT, folder / "build" / "torch-cuda")
    publish_kernel(hub, folder)
    dependency = f'[tool.kernels.dependencies]\n"{KERNEL}" = 1\n'
    project = write_files(tmp_path / "project", {"pyproject.toml": dependency})
    commands = [
        ["versions", KERNEL],
        ["info", KERNEL, "--version", "1", "--json"],
        ["lock", str(project)],
        ["download", str(project), "--all-variants"],
    ]
    code = SOURCES["kernels_commands"].format(commands=commands)
    versions, info, _, _ = python(hub, code, tmp_path / "home").split("----\n")
    assert "1" in versions and json.loads(info)
    assert len(list((tmp_path / "home").rglob(f"{VARIANT}/table.bin"))) == 1
    hub.kill()
    load = SOURCES["load_locked"].format(KERNEL=KERNEL, lock=str(project / "kernels.lock"))
    assert python(hub, load, tmp_path / "home", HF_HUB_OFFLINE="1") == "2.0"


def installed(config: pytest.Config, *packages: str) -> Path:
    """Return a directory with packages and their dependencies; it is kept in pytest's cache."""
    target = config.cache.mkdir("-".join(packages).replace("==", "-")) / "site"  # type: ignore[union-attr]
    if not target.exists():
        staging = target.with_name(f"new-{os.getpid()}")
        uv = Path(sys.executable).with_name("uv")
        install = [uv, "pip", "install", "-q", "--python", sys.executable, "--target", staging, *packages]
        done = subprocess.run(install, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"{packages} cannot be installed: {done.stderr[-300:]}")
        staging.rename(target)
    return target


def test_clients_that_know_models_only_load_a_kernel(
    hub: RunningHub, pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    """transformers 4.57 pins kernels 0.12."""
    publish_kernel(hub, write_kernel(tmp_path / "one"))
    client = str(installed(pytestconfig, "kernels==0.12.3", "huggingface_hub==0.36.2"))
    code = (
        "import torch, kernels, huggingface_hub\n"
        f"print(huggingface_hub.__version__, kernels.get_kernel('{KERNEL}', version=1).twice(torch.ones(1)).item())"
    )
    assert python(hub, code, tmp_path / "home", PYTHONPATH=client) == "0.36.2 2.0"


def test_the_older_client_reads_and_manages_repositories(
    hub: RunningHub, pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    older_client = installed(pytestconfig, "huggingface_hub==1.33.0")
    publish_kernel(hub, write_kernel(tmp_path / "one"))
    code = SOURCES["older_client"].format(KERNEL=KERNEL, VARIANT=VARIANT)
    answer = python(hub, code, tmp_path / "home", PYTHONPATH=str(older_client))
    assert "['main', 'v1']" in answer and "table.bin" in answer and "kernels-community/older" in answer
    assert "Invalid repo type" in answer and answer.endswith("False")

    load = f"import torch, kernels\nprint(kernels.get_kernel('{KERNEL}', version=1).twice(torch.ones(1)).item())"
    assert python(hub, load, tmp_path / "another-home", PYTHONPATH=str(older_client)) == "2.0"


ON_V1 = {"repo_id": KERNEL, "repo_type": "kernel", "revision": "v1"}


@pytest.fixture
def api(api: HfApi) -> HfApi:
    """The client of a Hub with an empty kernel and its branch v1."""
    api.create_branch(KERNEL, branch="v1", repo_type="kernel")
    return api


def put(api: HfApi, path: str, content: bytes, **options: object) -> CommitInfo:
    """Commit one file to v1."""
    return api.create_commit(operations=[CommitOperationAdd(path, content)], commit_message=path, **ON_V1, **options)


def test_commits(api: HfApi, tmp_path: Path) -> None:
    large = os.urandom(2_000_000)
    first = api.create_commit(
        operations=[
            CommitOperationAdd("build/a/x.so", large),
            CommitOperationAdd("build/b/x.so", large),
            CommitOperationAdd("build/a/π=1 %2F#?.py", b"pi = 3\n"),
            CommitOperationAdd("empty", b""),
        ],
        commit_message="first",
        **ON_V1,
    )
    # huggingface_hub 1.20 would take the files from there, and fails at it for kernels.
    assert "siblings" not in requests.get(f"{api.endpoint}/api/kernels/{KERNEL}").json()
    files = {item.path: item for item in api.list_repo_tree(recursive=True, **ON_V1)}
    assert files["build/a/x.so"].lfs.sha256 == files["build/b/x.so"].lfs.sha256
    for path, content in (("build/a/π=1 %2F#?.py", b"pi = 3\n"), ("build/b/x.so", large)):
        got = api.hf_hub_download(filename=path, cache_dir=tmp_path / "cache", **ON_V1)
        assert Path(got).read_bytes() == content
    api.create_commit(
        operations=[
            CommitOperationCopy("build/a/x.so", "build/c/x.so"),
            CommitOperationDelete("build/a/"),
            CommitOperationDelete("empty"),
        ],
        commit_message="second",
        parent_commit=first.oid,
        **ON_V1,
    )
    paths = ["build/a", "build/c", "empty", "nothing"]
    assert {item.path for item in api.get_paths_info(paths=paths, **ON_V1)} == {"build/c"}
    assert [commit.title for commit in api.list_repo_commits(**ON_V1)] == ["second", "first", "initial commit"]
    with pytest.raises(HfHubHTTPError, match="another commit came first"):
        put(api, "late", b"late", parent_commit=first.oid)


def test_pull_requests(hub: RunningHub, api: HfApi, tmp_path: Path) -> None:
    wanted = put(api, "wish", b"wish", create_pr=True)
    assert wanted.pr_revision == "refs/pr/1"
    assert api.file_exists(KERNEL, "wish", repo_type="kernel", revision="refs/pr/1")
    assert not api.file_exists(KERNEL, "wish", repo_type="kernel", revision="v1")
    refs = api.list_repo_refs(KERNEL, repo_type="kernel", include_pull_requests=True)
    assert [ref.ref for ref in refs.pull_requests] == ["refs/pr/1"]
    assert 'wish <span class="badge">added' in requests.get(wanted.pr_url).text
    words = ["hub", "merge", KERNEL, "1", wanted.oid]
    code = f"import sys; sys.argv[1:] = {words!r}; from kernel_builder.cli import main; main()"
    put(api, "other", b"")
    assert "is merged" in python(hub, code, tmp_path / "home")
    assert api.file_exists(KERNEL, "wish", repo_type="kernel", revision="v1")
    assert api.file_exists(KERNEL, "other", repo_type="kernel", revision="v1")
    assert "merged" in requests.get(wanted.pr_url).text
    again = put(api, "other", b"one", create_pr=True)
    put(api, "other", b"two")
    with pytest.raises(AssertionError, match=r"(?s)other changed on v1 as well.*review the pull request"):
        python(hub, code.replace("'1'", f"'{again.pr_num}'").replace(wanted.oid, again.oid), tmp_path / "home")
    assert 'other <span class="badge">changed' in requests.get(again.commit_url, headers={"Accept": "text/html"}).text


def test_tags_branches_and_repositories(api: HfApi) -> None:
    first = put(api, "first", b"1")
    put(api, "second", b"2")
    api.create_tag(KERNEL, tag="v1.0", revision=first.oid, tag_message="the first", repo_type="kernel")
    assert api.repo_info(KERNEL, revision="v1.0", repo_type="kernel").sha == first.oid
    api.delete_tag(KERNEL, tag="v1.0", repo_type="kernel")
    with pytest.raises(RevisionNotFoundError):
        api.repo_info(KERNEL, revision="v1.0", repo_type="kernel")
    api.delete_branch(KERNEL, branch="v1", repo_type="kernel")
    assert [ref.name for ref in api.list_repo_refs(KERNEL, repo_type="kernel").branches] == ["main"]

    api.move_repo(KERNEL, "other/twice", repo_type="kernel")
    assert not api.repo_exists(KERNEL, repo_type="kernel")
    api.delete_repo("other/twice", repo_type="kernel")
    assert not api.repo_exists("other/twice", repo_type="kernel") and not api.repo_exists(KERNEL, repo_type="kernel")


def test_large_files_without_xet(start_hub: Callable[..., RunningHub], tmp_path: Path) -> None:
    """The installed client has hf_xet, which would wait for minutes for a Hub with a private authority."""
    assert importlib.util.find_spec("hf_xet")
    hub = start_hub(FORWARDED_ALLOW_IPS="127.0.0.1")
    folder = write_kernel(tmp_path / "one")
    large = os.urandom(20_000_000)
    (folder / "build" / VARIANT / "large.so").write_bytes(large)
    code = SOURCES["large_files"].format(KERNEL=KERNEL, VARIANT=VARIANT, folder=str(folder))
    certificate = write_certificate(tmp_path)
    environment = {"HF_HUB_DISABLE_XET": "0", "SSL_CERT_FILE": str(certificate)}
    with alternating_proxy([hub.url], certificate) as url:
        seconds = float(python(hub, code, tmp_path / "home", HF_ENDPOINT=url, **environment))
    assert seconds < 60
    files = {item.path: item for item in hub.api().list_repo_tree(KERNEL, repo_type="kernel", recursive=True)}
    assert files[f"build/{VARIANT}/large.so"].lfs.sha256 == hashlib.sha256(large).hexdigest()
    assert files["zeros"].lfs.size == 3_000_000
    assert not list((hub.root / "incoming").iterdir())
