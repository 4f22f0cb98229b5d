"""Builds and uploads get SIGKILL at random moments: no package is half-written, and the next run completes."""

from __future__ import annotations

import hashlib
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import requests

from tests.nightly.conftest import SECONDS
from tests.support.places import CPU
from tests.support.running_hub import RunningHub

pytestmark = [pytest.mark.attack, pytest.mark.nightly, pytest.mark.timeout(1800)]

BUILDER = [sys.executable, "-m", "kernel_builder"]
MOST = 600  # seconds of one command


def digests(directory: Path) -> dict[str, str]:
    """Return the SHA-256 of every file in the packages of a `build`. Loaders ignore names that begin with a dot."""
    files = (path for path in sorted(directory.glob("[!.]*/**/*")) if path.is_file())
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def seconds_of(command: list[str], environment: dict[str, str]) -> float:
    """Run a command to its end and return its wall time."""
    start = time.monotonic()
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=MOST)
    return time.monotonic() - start


def killed(command: list[str], environment: dict[str, str], within: float) -> bool:
    """Start a command and kill it at a random moment; return whether it was still running."""
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        process.wait(random.uniform(0, within))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return True
    return False


def forget(project: Path, cache: Path, share: float) -> None:
    """Remove the package, and a share of the compiled objects and binaries of the cache."""
    for path in (project / "build", cache / "packages"):
        shutil.rmtree(path, ignore_errors=True)
    for output in sorted(cache.glob("[ob]*/*/*.*o")):
        if random.random() < share:
            output.unlink()


def published(url: str, repo_id: str) -> dict[str, str]:
    """Return the files of the packages on the branch of version 1, and the hashes of their content."""
    response = requests.get(f"{url}/api/kernels/{repo_id}/tree/v1?recursive=true", timeout=60)
    return {
        entry["path"]: entry.get("lfs", {}).get("oid") or entry["oid"]
        for entry in (response.json() if response.ok else [])
        if entry["type"] == "file" and entry["path"].startswith("build/")
    }


def test_killed_builds_and_uploads_leave_no_half_written_package(
    hub: RunningHub, copy_project: Callable[..., Path], new_cache: Callable[[str], Path]
) -> None:
    project, cache = copy_project("stable-scale"), new_cache("cache")
    environment = {**hub.environment, "KERNEL_BUILDER_CACHE": str(cache)}

    def upload(repo_id: str) -> list[str]:
        return [*BUILDER, "upload", str(project), "--repo-id", repo_id, "--no-load"]

    def build(directory: Path) -> list[str]:
        return [*BUILDER, "build", str(directory), "--variant", CPU, "--no-load"]

    seconds_of(build(project), environment)
    expected = digests(project / "build")
    usual_upload = seconds_of(upload("org/whole"), environment)
    whole = published(hub.url, "org/whole")
    rebuilt = Path(shutil.copytree(project, project.with_name("rebuilt")))
    forget(rebuilt, cache, 1.0)
    usual_build = seconds_of(build(rebuilt), environment)
    assert expected and whole
    end, kills = time.monotonic() + 2 * SECONDS, Counter[str]()
    while time.monotonic() < end:
        repo_id = f"org/k{kills['upload']}"
        kills["upload"] += killed(upload(repo_id), environment, usual_upload)
        assert published(hub.url, repo_id) in ({}, whole)
        forget(rebuilt, cache, random.choice([0.5, 1.0]))
        kills["build"] += killed(build(rebuilt), environment, usual_build)
        assert digests(rebuilt / "build") in ({}, expected)
        for output in cache.glob("[ob]*/*/*.*o"):
            recorded = output.with_name(f"{output.name}.sha256").read_text().split()[0]
            assert hashlib.sha256(output.read_bytes()).hexdigest() == recorded, output
        if kills["build"] % 10 == 9:
            seconds_of(upload(repo_id), environment)
            assert published(hub.url, repo_id) == whole
            seconds_of(build(rebuilt), environment)
            assert digests(rebuilt / "build") == expected
    assert kills["build"] and kills["upload"]
