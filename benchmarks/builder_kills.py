"""Kills builds, uploads and downloads at random moments, and looks for what they leave.

    .venv/bin/python benchmarks/builder_kills.py --json benchmarks/results/builder-kills.json

Each command gets SIGKILL at a random moment of the time that it takes undisturbed. What it then left is compared with
what an undisturbed one makes: files of a package or toolchain that are missing or differ are half-written. The command
is then run again, and must complete. A third of the kills each are for `build`, `upload` to a Hub of this machine, and
`toolchain fetch` from the configured index.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import requests
import result_files
from figures import ROOT, machine
from hub_process import running_hub

from kernel_builder.config.variant import this_platform

PROJECT = ROOT / "tests" / "projects" / "stable-scale"
VARIANT = f"torch-stable-abi210-cpu-{this_platform()}"
FETCHED = ("toolchain", "fetch", "--torch", "2.10")
SECONDS = 600


@dataclass
class Kills:
    """What was seen after the kills of one kind of command."""

    until: float
    usual: float = 0.0
    kills: int = 0
    late: int = 0
    nothing: int = 0
    whole: int = 0
    half: list[str] = field(default_factory=list)
    incomplete: list[str] = field(default_factory=list)

    def saw(self, present: dict[str, str], expected: dict[str, str], where: str) -> None:
        """Count a state: nothing, whole, or half-written."""
        if not present:
            self.nothing += 1
        elif present == expected:
            self.whole += 1
        else:
            differing = sorted(name for name in {*present, *expected} if present.get(name) != expected.get(name))
            self.half.append(f"{where}: {', '.join(differing[:3])}")


def files(directory: Path) -> dict[str, str]:
    """Return the SHA-256 of every file below a directory; of manifests, which have times, only that they are there."""
    if not directory.is_dir():
        return {}
    files = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return {str(path.relative_to(directory)): _digest(path) for path in files}


def _digest(path: Path) -> str:
    return "" if path.name == "manifest.json" else hashlib.sha256(path.read_bytes()).hexdigest()


def command(cache: Path, *arguments: object, **more: str) -> subprocess.Popen[bytes]:
    """Start the builder in a group of its own."""
    words = [sys.executable, "-m", "kernel_builder", *map(str, arguments)]
    environment = {**os.environ, "KERNEL_BUILDER_CACHE": str(cache), **more}
    silent = subprocess.DEVNULL
    return subprocess.Popen(words, env=environment, stdout=silent, stderr=silent, cwd=cache.parent)


def disturbed(kills: Kills, start: Callable[[], subprocess.Popen[bytes]], chosen: random.Random) -> None:
    """Start a command and kill it within its usual time, unless it ends before.

    Raises:
        TimeoutError: If the time for all kills is over.
    """
    if time.monotonic() > kills.until:
        raise TimeoutError
    running = start()
    with suppress(subprocess.TimeoutExpired):
        running.wait(chosen.uniform(0, kills.usual))
        kills.late += 1
        kills.usual *= 0.9
        return
    running.kill()
    running.wait()
    kills.kills += 1
    kills.usual *= 1.02


def _numbers(kills: Kills, count: int) -> Iterator[int]:
    """Count until so many commands were killed: some end before."""
    for number in itertools.count():
        if kills.kills >= count:
            return
        yield number


def kill_builds(directory: Path, count: int, chosen: random.Random, kills: Kills) -> None:
    """Kill builds that begin with a part of their steps done."""
    cache, project = directory / "cache", directory / "project"
    shutil.copytree(PROJECT, project)
    arguments = ("build", project, "--variant", VARIANT, "--no-load")
    _run(command(cache, *arguments))
    began = time.monotonic()
    _forget(cache, project, 1.0, chosen)
    _run(command(cache, *arguments))
    kills.usual, expected = time.monotonic() - began, files(project / "build")
    for number in _numbers(kills, count):
        _forget(cache, project, chosen.choice([0.5, 1.0]), chosen)
        disturbed(kills, lambda: command(cache, *arguments), chosen)
        kills.saw(files(project / "build"), expected, f"build {number}")
        for made in cache.glob("[ob]*/*/*.*o"):
            digest = made.with_name(f"{made.name}.sha256").read_text().split()[0]
            if hashlib.sha256(made.read_bytes()).hexdigest() != digest:
                kills.half.append(f"build {number}: {made.name} in the cache")
        if number % 10 == 9:
            _run(command(cache, *arguments))
            if files(project / "build") != expected:
                kills.incomplete.append(f"build {number}")


def _forget(cache: Path, project: Path, share: float, chosen: random.Random) -> None:
    """Remove the package, and a share of the outputs in the cache."""
    for path in (project / "build", cache / "packages"):
        shutil.rmtree(path, ignore_errors=True)
    for made in sorted(cache.glob("[ob]*/*/*.*o")):
        if chosen.random() < share:
            made.unlink()


def kill_uploads(directory: Path, count: int, chosen: random.Random, kills: Kills) -> None:
    """Kill uploads, each to a repository of its own."""
    cache, project = directory / "cache", directory / "project"
    shutil.copytree(PROJECT, project)
    _run(command(cache, "build", project, "--variant", VARIANT, "--no-load"))
    with running_hub(directory / "hub", "--log-level", "warning") as hub:

        def upload(repo_id: str) -> subprocess.Popen[bytes]:
            more = {"HF_ENDPOINT": hub.url, "HF_TOKEN": "any", "HF_HUB_DISABLE_TELEMETRY": "1"}
            return command(cache, "upload", project, "--repo-id", repo_id, "--no-load", "--quiet", **more)

        began = time.monotonic()
        _run(upload("org/whole"))
        kills.usual, expected = time.monotonic() - began, _published(hub.url, "org/whole")
        for number in _numbers(kills, count):
            repo_id = f"org/k{number}"
            disturbed(kills, lambda: upload(repo_id), chosen)  # noqa: B023  # called at once
            kills.saw(_published(hub.url, repo_id), expected, f"upload {number}")
            if number % 10 == 9:
                _run(upload(repo_id))
                if _published(hub.url, repo_id) != expected:
                    kills.incomplete.append(f"upload {number}")


def _published(url: str, repo_id: str) -> dict[str, str]:
    """Return the files of the packages on the branch of version 1, and the hashes of their content."""
    answer = requests.get(f"{url}/api/kernels/{repo_id}/tree/v1?recursive=true", timeout=60)
    entries = answer.json() if answer.ok else []
    return {
        entry["path"]: entry.get("lfs", {}).get("oid") or entry["oid"]
        for entry in entries
        if entry["type"] == "file" and entry["path"].startswith("build/")
    }


def kill_downloads(directory: Path, count: int, chosen: random.Random, kills: Kills) -> None:
    """Kill downloads of a toolchain into an empty store."""
    trees = "toolchains/trees"
    for number in itertools.chain([-1], _numbers(kills, count)):
        cache = directory / str(number)
        cache.mkdir()
        if number < 0:
            began = time.monotonic()
            _run(command(cache, *FETCHED))
            kills.usual, expected = time.monotonic() - began, files(cache / trees)
            continue
        disturbed(kills, lambda: command(cache, *FETCHED), chosen)  # noqa: B023  # called at once
        kills.saw(files(cache / trees), expected, f"download {number}")
        if number % 10 == 9:
            _run(command(cache, *FETCHED))
            if files(cache / trees) != expected:
                kills.incomplete.append(f"download {number}")
        shutil.rmtree(cache)


def _run(running: subprocess.Popen[bytes]) -> None:
    if running.wait(SECONDS):
        raise click.ClickException(f"exit status {running.returncode}: {running.args!r}")


KINDS = {"build": kill_builds, "upload": kill_uploads, "download": kill_downloads}


@click.command()
@click.option("--kills", default=200, show_default=True, help="Kills in all.")
@click.option("--minutes", default=60.0, show_default=True, help="Stop then, with fewer kills.")
@click.option("--seed", type=int, default=1, show_default=True, help="Chooses the moments.")
@click.option("--json", "output", type=click.Path(path_type=Path), required=True, help="The file to write.")
def main(kills: int, minutes: float, seed: int, output: Path) -> None:
    """Kill commands, and write what they left."""
    counts = {name: (kills + place) // len(KINDS) for place, name in enumerate(KINDS)}
    outcomes = {name: Kills(time.monotonic() + 60 * minutes) for name in KINDS}
    with tempfile.TemporaryDirectory(prefix="builder-kills-") as temporary, ThreadPoolExecutor(len(KINDS)) as pool:

        def work(name: str) -> None:
            directory = Path(temporary, name)
            directory.mkdir()
            with suppress(TimeoutError):
                KINDS[name](directory, counts[name], random.Random(f"{seed} {name}"), outcomes[name])

        list(pool.map(work, KINDS))
    values: dict[str, Any] = {
        name: {key: value for key, value in vars(outcomes[name]).items() if key not in ("until", "usual")}
        for name in KINDS
    }
    half, incomplete = (
        sum(len(getattr(kills, what)) for kills in outcomes.values()) for what in ("half", "incomplete")
    )
    done = sum(kills.kills for kills in outcomes.values())
    result = f"{done} kills: {half} half-written, {incomplete} that could not be completed"
    click.echo(result)
    about = {"machine": machine(), "date": time.strftime("%Y-%m-%d"), "seed": seed, "result": result}
    result_files.write(output, {**about, **values})


if __name__ == "__main__":
    main()
