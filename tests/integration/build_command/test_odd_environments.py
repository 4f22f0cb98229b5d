"""Users without a home directory, unusual umasks, and unusual places of the cache."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.build_command.conftest import BUILDER, environment
from tests.support.places import CPU

CPU_ALONE = "torch-cpu"
OPTIONS = ("--variant", CPU, "--no-load")


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
    line = [*as_number, BUILDER, "build", project, *OPTIONS]
    done = subprocess.run(
        line, capture_output=True, text=True, env={**env, "KERNEL_BUILDER_CACHE": str(cache)}, check=False
    )
    assert done.returncode == 0, done.stderr


def test_other_users_cannot_write_outputs_under_umask_0(copy_project: Callable[..., Path], tmp_path: Path) -> None:
    """Another user could put objects into the cache."""
    project, cache = copy_project("python-only"), tmp_path / "made" / "cache"
    command = [BUILDER, "build", project, "--variant", CPU_ALONE, "--no-load", "--json"]
    done = subprocess.run(command, env=environment(cache), umask=0, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "warning" not in done.stderr, done
    places = [cache, *cache.rglob("*"), project / "build", *(project / "build").rglob("*")]
    assert {path.stat().st_mode & 0o777 & ~0o775 for path in places if not path.name.endswith(".json")} == {0}
    cache.chmod(0o777)
    done = subprocess.run(command, env=environment(cache), capture_output=True, text=True, check=True)
    assert "other users can write to the cache" in done.stderr


@pytest.mark.parametrize("place", ["foreign", "elsewhere"])
def test_unusual_places_of_the_cache(copy_project: Callable[..., Path], tmp_path: Path, place: str) -> None:
    """A cache that is another user's, or on another file system than the project."""
    project, cache = copy_project("python-only"), tmp_path / "cache"
    cache.mkdir()
    as_root = [shutil.which("unshare") or "unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    mounts = {
        "elsewhere": f"mount -t tmpfs -o mode=700 cache {cache}",
        "foreign": "true",
    }
    if place != "foreign" and subprocess.run([*as_root, mounts[place]], capture_output=True, check=False).returncode:
        pytest.skip("this machine has no user namespaces")
    if place == "foreign" and os.geteuid() != 0:
        pytest.skip("only root can give a directory away")
    if place == "foreign":
        os.chown(cache, 54321, 54321)
    command = [BUILDER, "build", project, "--variant", CPU_ALONE, "--no-load", "--json"]
    line = command if place == "foreign" else [*as_root, f'{mounts[place]} && exec "$@"', "sh", *command]
    done = subprocess.run(line, env=environment(cache), capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr, done
    assert ("other users can write to the cache" in done.stderr) == (place == "foreign")
    assert done.returncode == 0, done
