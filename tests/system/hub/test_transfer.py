"""Export and import of kernels and organizations, by a file and from another Hub."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import CommitOperationAdd

from kernel_builder.hub.transfer import export_kernels, import_kernels
from kernel_format.errors import HubError, VerificationError
from tests.support.running_hub import RunningHub
from tests.support.small_kernel import KERNEL, VARIANT, publish_kernel, write_kernel


def test_export_and_import(start_hub: Callable[..., RunningHub], tmp_path: Path) -> None:
    inside, outside = start_hub(root=tmp_path / "inside"), start_hub(root=tmp_path / "outside")
    publish_kernel(outside, write_kernel(tmp_path / "one"))
    archive = tmp_path / "twice.tar"
    assert set(export_kernels([KERNEL], archive, endpoint=outside.url)[0].branches) == {"main", "v1"}
    first = archive.read_bytes()
    export_kernels([KERNEL], archive, endpoint=outside.url, token=False)
    assert archive.read_bytes() == first
    first_import = import_kernels(archive, endpoint=inside.url, token="any")
    again = import_kernels(archive, endpoint=inside.url, token="any")
    assert again[0].branches == first_import[0].branches
    assert (set(first_import[0].updated), again[0].updated) == ({"v1"}, [])
    for revision in ("main", "v1"):
        trees = [
            {
                item.path: item.blob_id
                for item in hub.api().list_repo_tree(KERNEL, repo_type="kernel", revision=revision, recursive=True)
                if hasattr(item, "blob_id")
            }
            for hub in (inside, outside)
        ]
        assert trees[0] == trees[1]

    api = outside.api()
    changed = CommitOperationAdd(f"build/{VARIANT}/__init__.py", b"def twice(x):\n    return x * 3\n")
    api.create_commit(KERNEL, [changed], commit_message="after the digest", repo_type="kernel", revision="v1")
    with pytest.raises(VerificationError, match="do not match the metadata"):
        export_kernels([KERNEL], tmp_path / "never.tar", endpoint=outside.url)
    assert not (tmp_path / "never.tar").exists()

    tampered = tmp_path / "tampered.tar"
    tampered.write_bytes(first.replace(b"return x * 2", b"return x * 3"))
    shutil.copyfile(archive, cut := tmp_path / "cut.tar")
    os.truncate(cut, len(first) // 2)
    with tarfile.open(strange := tmp_path / "strange.tar", "w") as tar:
        manifest = json.dumps({"format": 1, "repository": 1, "from": outside.url, "branches": {}}).encode()
        (member := tarfile.TarInfo("manifest.json")).size = len(manifest)
        tar.addfile(member, io.BytesIO(manifest))
    empty = start_hub(root=tmp_path / "empty")
    for wrong in (tampered, cut, strange):
        with pytest.raises(VerificationError):
            import_kernels(wrong, endpoint=empty.url, token="any")
    assert not empty.api().repo_exists(KERNEL, repo_type="kernel")


def test_export_and_import_of_an_organization(start_hub: Callable[..., RunningHub], tmp_path: Path) -> None:
    inside, outside = start_hub(root=tmp_path / "inside"), start_hub(root=tmp_path / "outside")
    for name in ("a/one", "a/two", "b/three"):
        publish_kernel(outside, write_kernel(tmp_path / name, repo_id=name), repo_id=name, private=name == "a/two")
    archive = tmp_path / "a.tar"
    command = [sys.executable, "-c", "from kernel_builder.cli import main; main()", "hub"]

    def run(hub: RunningHub, *arguments: str) -> Any:
        done = subprocess.run([*command, *arguments], env=hub.environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    exported = run(outside, "export", "a", str(archive), "--json")["repositories"]
    assert [item["repo_id"] for item in exported] == ["a/one", "a/two"]
    with tarfile.open(archive) as tar:  # the table and the code, which both have, are in it once
        assert sum(member.size > 1_000_000 for member in tar) == 1
    for _ in range(2):  # again, as after an error
        imported = run(inside, "import", str(archive), "--organization", "ours", "--json")["repositories"]
        assert [set(item["branches"]) for item in imported] == [{"main", "v1"}] * 2
    api = inside.api()
    assert len(api.list_repo_commits("ours/one", repo_type="kernel", revision="v1")) == 2
    assert api.repo_info("ours/two", repo_type="kernel").private
    assert not api.repo_info("ours/one", repo_type="kernel").private and not api.repo_exists(
        "a/one", repo_type="kernel"
    )
    done = subprocess.run(
        [*command, "export", "none", str(archive)],
        env=outside.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode and "none has no kernels" in done.stderr

    # An archive of format 1.
    with tarfile.open(archive) as tar:
        file = tar.extractfile("manifest.json")
        assert file is not None
        manifest = json.load(file)
    repository = manifest["repositories"]["a/one"]
    old = {"format": 1, "repository": "a/one", "from": manifest["from"], "branches": repository["branches"]}
    wanted = {item["sha256"] for branch in repository["branches"].values() for item in branch["files"].values()}
    with tarfile.open(archive) as source, tarfile.open(tmp_path / "old.tar", "w") as tar:
        content = json.dumps(old).encode()
        (member := tarfile.TarInfo("manifest.json")).size = len(content)
        tar.addfile(member, io.BytesIO(content))
        for member in source:
            if member.name.removeprefix("files/") in wanted:
                tar.addfile(member, source.extractfile(member))
    assert run(inside, "import", str(tmp_path / "old.tar"), "--json")["repositories"][0]["repo_id"] == "a/one"


COPY = [sys.executable, "-c", "from kernel_builder.cli import main; main()", "hub", "import"]


def copy(inside: RunningHub, outside: RunningHub, source: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [*COPY, source, "--from", outside.url, "--endpoint", inside.url, *options]
    return subprocess.run(command, env=inside.environment, capture_output=True, text=True, check=False)


def downloads(hub: RunningHub) -> int:
    """Return how many files the Hub has sent."""
    lines = [json.loads(line) for line in hub.log.read_text().splitlines()]
    return sum(line.get("method") == "GET" and "/resolve/" in line.get("path", "") for line in lines)


@pytest.fixture
def pair(start_hub: Callable[..., RunningHub], tmp_path: Path) -> tuple[RunningHub, RunningHub]:
    """An empty Hub, and a Hub with a kernel."""
    inside, outside = start_hub(root=tmp_path / "inside"), start_hub(root=tmp_path / "outside")
    publish_kernel(outside, write_kernel(tmp_path / "one"))
    return inside, outside


def test_an_import_from_a_hub_transfers_changes_only(pair: tuple[RunningHub, RunningHub], tmp_path: Path) -> None:
    inside, outside = pair
    first = copy(inside, outside, KERNEL)
    assert first.returncode == 0 and f"{KERNEL}: v1; 3 distinct files" in first.stdout, first.stderr
    commits = len(inside.api().list_repo_commits(KERNEL, repo_type="kernel", revision="v1"))
    sent = downloads(outside)
    for _ in range(2):
        again = copy(inside, outside, KERNEL)
        assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert downloads(outside) == sent
    result = json.loads(copy(inside, outside, "kernels-community", "--json").stdout)
    assert [item["updated"] for item in result["repositories"]] == [[]]
    assert len(inside.api().list_repo_commits(KERNEL, repo_type="kernel", revision="v1")) == commits

    change = [CommitOperationAdd("README.md", b"new"), CommitOperationAdd("x.py", b"x")]
    outside.api().create_commit(KERNEL, change, commit_message="m", repo_type="kernel")
    publish_kernel(outside, write_kernel(tmp_path / "two", version=2, factor=3), branch="v2")
    result = json.loads(copy(inside, outside, KERNEL, "--json").stdout)["repositories"][0]
    assert result["updated"] == ["main", "v2"] and downloads(outside) == sent + 2 + 5
    assert inside.api().list_repo_files(KERNEL, repo_type="kernel") == ["README.md", "x.py"]
    # A package is verified as a whole, and nothing of a wrong one is published. Other kernels are copied.
    changed = CommitOperationAdd(f"build/{VARIANT}/__init__.py", b"def twice(x):\n    return x * 3\n")
    outside.api().create_commit(KERNEL, [changed], commit_message="m", repo_type="kernel", revision="v1")
    publish_kernel(outside, write_kernel(tmp_path / "three"), repo_id="kernels-community/zwei")
    head = inside.api().repo_info(KERNEL, repo_type="kernel", revision="v1").sha
    wrong = copy(inside, outside, "kernels-community")
    assert wrong.returncode == VerificationError.exit_code and "do not match the metadata" in wrong.stderr
    assert "kernels-community/zwei: v1" in wrong.stdout
    assert inside.api().repo_info(KERNEL, repo_type="kernel", revision="v1").sha == head
    outside.kill()
    assert copy(inside, outside, KERNEL).returncode == HubError.exit_code


def test_an_import_may_be_killed_and_run_twice_at_once(pair: tuple[RunningHub, RunningHub], tmp_path: Path) -> None:
    inside, outside = pair
    for number in range(3):
        publish_kernel(outside, write_kernel(tmp_path / f"{number}"), repo_id=f"kernels-community/k{number}")
    command = [*COPY, "kernels-community", "--from", outside.url, "--endpoint", inside.url]
    for seconds in (1.5, 3):
        with subprocess.Popen(command, env=inside.environment, stderr=subprocess.DEVNULL) as process:
            time.sleep(seconds)
            process.kill()
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(copy, inside, outside, "kernels-community") for _ in range(2)]
    assert [done.result().returncode for done in both] == [0, 0], [done.result().stderr for done in both]
    assert copy(inside, outside, "kernels-community").stdout == ""
    for repo_id in (KERNEL, *(f"kernels-community/k{number}" for number in range(3))):
        files = [hub.api().list_repo_files(repo_id, repo_type="kernel", revision="v1") for hub in pair]
        assert files[0] == files[1]
        assert len(inside.api().list_repo_commits(repo_id, repo_type="kernel", revision="v1")) == 2
