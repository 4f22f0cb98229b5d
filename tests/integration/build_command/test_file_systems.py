"""Builds on full disks, in mount points and overlays, and on read-only file systems."""

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
@pytest.mark.parametrize("kilobytes", [8, 40, 120])
def test_disk_full_while_compiling(
    copy_project: Copy, new_cache: NewCache, kernel_builder: Run, tmp_path: Path, kilobytes: int
) -> None:
    project, cache = copy_project("stable-scale"), tmp_path / "cache"
    cache.mkdir()
    store = new_cache("other") / "toolchains"
    script = f"""
mount -t tmpfs -o size={kilobytes}k none {cache}; ln -s {store.resolve()} {cache}/toolchains
exec {BUILDER} build {project} --variant {CPU} --no-load --json
"""
    with untouched(project):
        done = in_namespace(script, cache)
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["error"]) == (4, "StoreError"), answer
    assert str(cache) in answer["where"]
    assert "KERNEL_BUILDER_CACHE" in answer["hint"]


@needs_mounts
@pytest.mark.parametrize(("kilobytes", "below"), [(8, False), (64, False), (64, True)])
def test_disk_full_while_assembling(
    copy_project: Copy, new_cache: NewCache, kernel_builder: Run, tmp_path: Path, kilobytes: int, below: bool
) -> None:
    """The volume's content stays unchanged, whether the volume is the destination or contains it."""
    project, cache, volume = copy_project("python-only"), new_cache("cache"), tmp_path / "volume"
    volume.mkdir()
    package = project / "torch-ext" / "python_only"
    (package / "tables.py").write_text("# " + "x" * (kilobytes * 1024))
    out = volume / "out" if below else volume
    before, after = tmp_path / "before", tmp_path / "after"
    script = f"""
mount -t tmpfs -o size={kilobytes}k none {volume}
mkdir -p {out}/torch-cpu; echo old > {out}/torch-cpu/metadata.json
cp -a {volume} {before}
{BUILDER} build {project} --out {out} --no-load --json && exit 100 || code=$?
cp -a {volume} {after}
exit $code
"""
    done = in_namespace(script, cache)
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["error"]) == (6, "PackageError"), answer
    assert "No space left" in answer["message"]
    assert "--out" in answer["hint"]
    assert snapshot(after) == snapshot(before)


@needs_mounts
def test_packages_in_a_mount_point_are_replaced(copy_project: Copy, new_cache: NewCache, tmp_path: Path) -> None:
    """A mount point or bind mount cannot be moved: its packages are replaced one by one."""
    project, cache, volume, result = copy_project("python-only"), new_cache("cache"), tmp_path / "v", tmp_path / "r"
    for mount in ("mount -t tmpfs none", f"mkdir {tmp_path}/source; mount --bind {tmp_path}/source"):
        volume.mkdir(exist_ok=True)
        script = f"""
set -e
{mount} {volume}
mkdir {volume}/torch-cpu; touch {volume}/torch-cpu/__init__.py; echo old > {volume}/torch-cpu/old.py
{BUILDER} build {project} --out {volume} --no-load --json
rm -rf {result}; cp -a {volume} {result}
"""
        done = in_namespace(script, cache)
        assert done.returncode == 0, done
        assert sorted(path.name for path in result.iterdir()) == ["torch-cpu", "torch-cuda"]
        assert not (result / "torch-cpu" / "old.py").exists()
        assert (result / "torch-cpu" / "metadata.json").is_file()


@needs_mounts
def test_packages_of_a_container_image_cannot_be_replaced(
    copy_project: Copy, new_cache: NewCache, tmp_path: Path
) -> None:
    """An overlay's lower directories cannot be renamed: an error, and the old packages stay."""
    image, cache = copy_project("python-only"), new_cache("cache")
    merged, result = tmp_path / "merged", tmp_path / "result"
    (image / "build" / "torch-cpu").mkdir(parents=True)
    (image / "build" / "torch-cpu" / "__init__.py").touch()
    merged.mkdir()
    script = f"""
set -e
mount -t tmpfs none /mnt; mkdir /mnt/upper /mnt/work
mount -t overlay none -o lowerdir={image},upperdir=/mnt/upper,workdir=/mnt/work {merged} || exit 77
{BUILDER} build {merged} --variant torch-cpu --no-load --json && exit 100 || code=$?
cp -a {merged} {result}
exit $code
"""
    done = in_namespace(script, cache)
    if done.returncode == 77:
        pytest.skip("no overlays here")
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["error"]) == (6, "PackageError"), answer
    assert "--out" in answer["hint"]
    assert snapshot(result) == snapshot(image)


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


def test_a_check_that_cannot_be_recorded_is_repeated(
    copy_project: Copy, new_cache: NewCache, kernel_builder: Run
) -> None:
    """If the cache cannot record that a package was checked, the next build checks it again."""
    project, cache = copy_project("python-only"), new_cache("cache")
    (cache / "packages").write_text("in the way")
    for _ in range(2):
        done = kernel_builder(cache, "build", project, "--no-load")
        assert done.code == 0, done
        assert {package["status"] for package in done.answer["packages"]} == {"built"}
