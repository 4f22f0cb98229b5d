"""Export and import of kernels and organisations."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import CommitOperationAdd

from kernel_builder.hub.transfer import export_kernels, import_kernels
from kernel_format.errors import ConfigError, VerificationError
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
    carried = import_kernels(archive, endpoint=inside.url, token="any")
    assert import_kernels(archive, endpoint=inside.url, token="any") == carried
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

    command = [sys.executable, "-c", "from kernel_builder.cli import main; main()", "hub", "import", KERNEL, "--json"]
    options = ["--from", outside.url, "--endpoint", inside.url, "--repo-id", "ours/copy", "--private"]
    done = subprocess.run([*command, *options], env=inside.environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)["branches"]) == {"main", "v1"}
    assert inside.api().repo_info("ours/copy", repo_type="kernel").private

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
    with pytest.raises(ConfigError, match="cannot have one name"):
        import_kernels(_of_two(archive, tmp_path / "two.tar"), repo_id="a/b", endpoint=empty.url, token="any")
    for wrong in (tampered, cut, strange):
        with pytest.raises(VerificationError):
            import_kernels(wrong, endpoint=empty.url, token="any")
    assert not empty.api().repo_exists(KERNEL, repo_type="kernel")


def _of_two(archive: Path, target: Path) -> Path:
    """Write an archive with the repository of another one twice, under two names."""
    with tarfile.open(archive) as source, tarfile.open(target, "w") as tar:
        for member in source:
            file = source.extractfile(member)
            assert file is not None
            content = file.read()
            if member.name == "manifest.json":
                manifest = json.loads(content)
                manifest["repositories"]["other/name"] = manifest["repositories"][KERNEL]
                content = json.dumps(manifest).encode()
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return target


def test_export_and_import_of_an_organisation(start_hub: Callable[..., RunningHub], tmp_path: Path) -> None:
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
    direct = run(inside, "import", "b", "--from", outside.url, "--json")
    assert direct["repo_id"] == "b/three" and api.repo_exists("b/three", repo_type="kernel")
    done = subprocess.run(
        [*command, "export", "nobody", str(archive)],
        env=outside.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode and "nobody has no kernels" in done.stderr

    # An archive of an earlier version.
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
    assert run(inside, "import", str(tmp_path / "old.tar"), "--json")["repo_id"] == "a/one"
