"""Full disks, read-only file systems, users without a home directory, unusual umasks and places of the cache."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.integration.build_command.conftest import BUILDER, FOR_CPU, Copy, NewCache, environment, snapshot, untouched
from tests.support.places import CPU, SOURCES
from tests.support.programs import run

pytestmark = pytest.mark.attack

CPU_ALONE = "torch-cpu"


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
def test_disk_full_while_compiling(copy_project: Copy, new_cache: NewCache, tmp_path: Path) -> None:
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
def test_disk_full_while_assembling(copy_project: Copy, cache: Path, tmp_path: Path) -> None:
    project, out = copy_project("python-only"), tmp_path / "volume"
    out.mkdir()
    (project / "torch-ext/python_only/tables.py").write_text("# " + "x" * (64 * 1024))
    before, after = tmp_path / "before", tmp_path / "after"
    script = SOURCES["build_on_a_full_disk"].format(
        out=out, before=before, after=after, project=project, BUILDER=BUILDER
    )
    done = in_namespace(script, cache)
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["error"]) == (6, "PackageError"), answer
    assert "No space left" in answer["message"]
    assert "--out" in answer["hint"]
    assert snapshot(after) == snapshot(before)


@needs_mounts
@pytest.mark.parametrize("where", ["cache", "project"])
def test_a_read_only_file_system_is_reported(copy_project: Copy, cache: Path, where: str) -> None:
    project = copy_project("python-only")
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


def test_a_user_without_a_home(project: Path, cache: Path) -> None:
    if not (unshare := shutil.which("unshare")):
        pytest.skip("this machine has no unshare")
    as_number = [unshare, "--user", "--map-user=54321"]
    if subprocess.run([*as_number, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine has no user namespaces")
    unset = ("HOME", "USER", "LOGNAME", "XDG_CACHE_HOME", "KERNEL_BUILDER_CACHE")
    env = {name: value for name, value in os.environ.items() if name not in unset}
    for command in ("build", "list-variants"):
        line = [*as_number, BUILDER, command, project, "--json"]
        done = subprocess.run(line, capture_output=True, text=True, env=env, check=False)
        assert "Traceback" not in done.stderr
        assert done.returncode == 4
        assert "no home directory" in json.loads(done.stdout)["message"]
    run(*as_number, BUILDER, "build", project, *FOR_CPU, env={**env, "KERNEL_BUILDER_CACHE": str(cache)})


def test_other_users_cannot_write_outputs_under_umask_0(copy_project: Copy, tmp_path: Path) -> None:
    """Another user could put objects into the cache."""
    project, cache = copy_project("python-only"), tmp_path / "made" / "cache"
    command = [BUILDER, "build", project, "--variant", CPU_ALONE, "--no-load", "--json"]
    done = subprocess.run(command, env=environment(cache), umask=0, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "warning" not in done.stderr, done
    places = [cache, *cache.rglob("*"), project / "build", *(project / "build").rglob("*")]
    assert {path.stat().st_mode & 0o777 & ~0o775 for path in places if not path.name.endswith(".json")} == {0}
    for place, mode, user, group in (
        (cache, 0o777, -1, -1),
        (cache / "objects", 0o2775, -1, 54321),
        (cache / "binaries" / "ab", 0o777, -1, -1),
        (cache.parent, 0o777, -1, -1),
        (cache, 0o755, 54321, 54321),
    ):
        cache.parent.chmod(0o755)
        cache.chmod(0o755)
        place.mkdir(exist_ok=True, parents=True)
        if os.geteuid() == 0:
            os.chown(place, user, group)
        place.chmod(mode)
        done = subprocess.run(command, env=environment(cache), capture_output=True, text=True, check=True)
        assert os.geteuid() != 0 or "other users can write to the cache" in done.stderr
        if place not in (cache, cache.parent):
            place.chmod(0o755)
            os.chown(place, os.geteuid(), os.getegid())


@needs_mounts
def test_a_cache_on_another_file_system(copy_project: Copy, tmp_path: Path) -> None:
    project, cache = copy_project("python-only"), tmp_path / "cache"
    cache.mkdir()
    command = f"exec {BUILDER} build {project} --variant {CPU_ALONE} --no-load --json"
    done = in_namespace(f"mount -t tmpfs -o mode=700 cache {cache} && {command}", cache)
    assert done.returncode == 0 and "other users" not in done.stderr, done
