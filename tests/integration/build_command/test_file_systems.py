"""Builds on full disks, and on read-only file systems."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.integration.build_command.conftest import (
    BUILDER,
    Copy,
    NewCache,
    Run,
    environment,
    snapshot,
    untouched,
)
from tests.support.places import CPU


def in_namespace(script: str, cache: Path) -> subprocess.CompletedProcess[str]:
    """Run a shell script in a mount namespace of its own, with the builder's cache."""
    command = ["unshare", "-m", "sh", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(cache), check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done


MAY_MOUNT = (
    shutil.which("unshare") is not None
    and subprocess.run(
        ["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False
    ).returncode
    == 0
)


needs_mounts = pytest.mark.skipif(not MAY_MOUNT, reason="this user may not mount file systems")


@needs_mounts
def test_disk_full_while_compiling(
    copy_project: Copy, new_cache: NewCache, kernel_builder: Run, tmp_path: Path
) -> None:
    project, cache = copy_project("stable-scale"), tmp_path / "cache"
    cache.mkdir()
    store = new_cache("other") / "toolchains"
    script = f"""
mount -t tmpfs -o size=40k none {cache}; ln -s {store.resolve()} {cache}/toolchains
exec {BUILDER} build {project} --variant {CPU} --no-load --json
"""
    with untouched(project):
        done = in_namespace(script, cache)
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["error"]) == (4, "StoreError"), answer
    assert str(cache) in answer["where"]
    assert "KERNEL_BUILDER_CACHE" in answer["hint"]


@needs_mounts
def test_disk_full_while_assembling(
    copy_project: Copy, new_cache: NewCache, kernel_builder: Run, tmp_path: Path
) -> None:
    project, cache, out = copy_project("python-only"), new_cache("cache"), tmp_path / "volume"
    out.mkdir()
    package = project / "torch-ext" / "python_only"
    (package / "tables.py").write_text("# " + "x" * (64 * 1024))
    before, after = tmp_path / "before", tmp_path / "after"
    script = f"""
mount -t tmpfs -o size=64k none {out}
mkdir -p {out}/torch-cpu; echo old > {out}/torch-cpu/metadata.json
cp -a {out} {before}
{BUILDER} build {project} --out {out} --no-load --json && exit 100 || code=$?
cp -a {out} {after}
exit $code
"""
    done = in_namespace(script, cache)
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["error"]) == (6, "PackageError"), answer
    assert "No space left" in answer["message"]
    assert "--out" in answer["hint"]
    assert snapshot(after) == snapshot(before)


@needs_mounts
@pytest.mark.parametrize("where", ["cache", "project"])
def test_a_read_only_file_system_is_reported(
    copy_project: Copy, new_cache: NewCache, tmp_path: Path, where: str
) -> None:
    project, cache = copy_project("python-only"), new_cache("cache")
    place = cache if where == "cache" else project
    with untouched(project, cache):
        setup = f"mount --bind {place} {place}; mount -o remount,ro,bind {place}"
        done = in_namespace(f"set -e; {setup}; exec {BUILDER} build {project} --no-load --json", cache)
        shutil.rmtree(cache / "locks", ignore_errors=True)
    answer = json.loads(done.stdout)
    assert answer["error"] == ("StoreError" if where == "cache" else "PackageError")
    assert "Read-only file system" in answer["message"]
    assert str(place) in answer["where"]
    assert ("KERNEL_BUILDER_CACHE" if where == "cache" else "--out") in answer["hint"]
