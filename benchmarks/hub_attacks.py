"""Attacks a Hub over loopback and writes what happens, for docs/security.md.

    .venv/bin/python benchmarks/hub_attacks.py --json benchmarks/results/hub-attacks.json
    .venv/bin/python benchmarks/hub_attacks.py --only soak --seconds 1800 --json benchmarks/results/hub-soak.json

Attackers, clients and the server share this machine's cores. `--only soak` needs root for its disk of 1 GB, a tmpfs.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import requests
import result_files
from figures import machine
from hub_process import HEADERS, HubProcess, running_hub
from hub_soak import housekeeping, soak

from kernel_hub.git.objects import FileChange
from kernel_hub.hub_service import Hub
from kernel_hub.settings import Settings
from kernel_hub.storage import locks

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "packages/kernel-hub/tests")]

from test_server_limits import COSTLY_CARDS  # noqa: E402

OPTIONS = ("--log-level", "warning")
MB = 1_000_000


@dataclass(frozen=True)
class Attack:
    """One attack: what it does, how it was tried, and what was measured."""

    attack: str
    tried: str
    result: str
    values: dict[str, Any]


def connect(hub: HubProcess) -> socket.socket:
    """Open a connection."""
    host, port = hub.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def commit_files(hub: HubProcess, repo_id: str, files: dict[str, str], timeout: float = 60) -> requests.Response:
    """Commit small files to `main`."""
    lines: list[dict[str, Any]] = [{"key": "header", "value": {"summary": "s"}}]
    lines += [{"key": "file", "value": {"path": path, "content": text}} for path, text in files.items()]
    body = "\n".join(json.dumps(line) for line in lines)
    return requests.post(f"{hub.url}/api/kernels/{repo_id}/commit/main", data=body, headers=HEADERS, timeout=timeout)


def create_kernel(hub: HubProcess, repo_id: str, files: dict[str, str]) -> None:
    """Create a kernel with small files."""
    hub.create(repo_id)
    commit_files(hub, repo_id, files).raise_for_status()


def slowest_health(hub: HubProcess, during: Callable[[], object]) -> float:
    """Call a function, and return the longest time that /health took meanwhile, in seconds."""
    slowest = 0.0
    with ThreadPoolExecutor(1) as other:
        running = other.submit(during)
        while not running.done():
            began = time.perf_counter()
            requests.get(f"{hub.url}/health", timeout=60)
            slowest = max(slowest, time.perf_counter() - began)
        running.result()
    return slowest


def yaml_attack(directory: Path) -> Attack:
    """Send documents that are costly to build."""
    chain = ["a: &a {x: 1}"]
    chain += [f"{letter}: &{letter} {{<<: [{','.join([f'*{last}'] * 9)}]}}" for last, letter in pairwise("abcdefghij")]
    documents = {
        "merge keys, 660 bytes": "\n".join(chain),
        "64 KB of values": "a: [" + "1," * 32_000 + "]",
        "990 dates": "".join(f"k{number}: 2001-12-14t21:59:43.10-05:00\n" for number in range(990)),
        "64 KB of brackets": "a: " + "[" * 65_000,
        "a number of base 60": "a: !!int '" + "1:" * 30_000 + "1'",
    }
    costs: dict[str, float] = {}
    with running_hub(directory / "hub", *OPTIONS) as hub:

        def send() -> None:
            for name, document in documents.items():
                card = {"content": f"---\n{document}\n---\n"}
                before = hub.cpu_seconds()
                for _ in range(20):
                    requests.post(f"{hub.url}/api/validate-yaml", json=card, timeout=60)
                costs[name] = (hub.cpu_seconds() - before) / 20

        slowest = slowest_health(hub, send)
    most = max(costs, key=lambda name: costs[name])
    return Attack(
        "YAML that is small and stands for much",
        f"/api/validate-yaml without a token: {', '.join(documents)}; each 20 times, with /health beside them",
        f"at most {costs[most] * 1000:.0f} ms of CPU ({most}); /health within {slowest * 1000:.0f} ms",
        {"cpu-seconds": costs, "health-seconds": slowest},
    )


def cards_attack(directory: Path) -> Attack:
    """Open pages whose cards are costly to render, each once."""
    costs: dict[str, float] = {}
    with running_hub(directory / "hub", *OPTIONS) as hub:
        create_kernel(hub, "a/plain", {"README.md": "# Plain\n"})
        requests.get(f"{hub.url}/kernels/a/plain", timeout=60).raise_for_status()  # compiles the template, once
        for number, (name, card) in enumerate(COSTLY_CARDS.items()):
            create_kernel(hub, f"a/card{number}", {"README.md": card})
            before = hub.cpu_seconds()
            requests.get(f"{hub.url}/kernels/a/card{number}", timeout=60).raise_for_status()
            costs[name] = hub.cpu_seconds() - before
        most_memory = hub.peak_bytes()
    most = max(costs, key=lambda name: costs[name])
    return Attack(
        "cards that take long to render",
        f"pages with cards of up to 32 KB, each opened once: {', '.join(costs)}",
        f"at most {costs[most] * 1000:.0f} ms of CPU ({most}), {most_memory / MB:.0f} MB of memory",
        {"cpu-seconds": costs, "memory-bytes": most_memory},
    )


def heads_attack(directory: Path) -> Attack:
    """Send heads without end."""
    floods = {
        "lines": (b"GET /health HTTP/1.1\r\nHost: localhost\r\n", b"X: y\r\n" * 10_000),
        "one line": (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ", b"y" * 60_000),
        "an address": (b"GET /", b"y" * 60_000),
        "trailers": (
            b"POST /api/validate-yaml HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n",
            b"X: y\r\n" * 10_000,
        ),
    }
    taken: dict[str, int] = {}
    with running_hub(directory / "hub", *OPTIONS) as hub:
        before = hub.peak_bytes()
        for name, (start, more) in floods.items():
            sent = 0
            with connect(hub) as connection, suppress(OSError):
                connection.sendall(start)
                while sent < 1000 * MB:
                    connection.sendall(more)
                    sent += len(more)
            taken[name] = sent
        grown = hub.peak_bytes() - before
    return Attack(
        "request heads without end",
        f"up to 1 GB each of {', '.join(floods)}",
        f"cut off after at most {max(taken.values()) / MB:.1f} MB; {grown / MB:.0f} MB more memory",
        {"sent-bytes": taken, "memory-bytes": grown},
    )


def readers_attack(directory: Path, readers: int = 500) -> Attack:
    """Ask for a file and do not read it."""
    with running_hub(directory / "hub", *OPTIONS) as hub, ExitStack() as opened:
        create_kernel(hub, "a/one", {"large": "x" * 9 * MB})
        for _ in range(readers):
            connection = opened.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.settimeout(60)
            host, port = hub.url.removeprefix("http://").split(":")
            connection.connect((host, int(port)))
            connection.sendall(b"GET /kernels/a/one/resolve/main/large HTTP/1.1\r\nHost: localhost\r\n\r\n")
        slowest = slowest_health(hub, lambda: time.sleep(5))
        most = hub.peak_bytes()
    return Attack(
        "readers that do not read",
        f"{readers} connections ask for a file of 9 MB in git, and read nothing",
        f"{most / MB:.0f} MB of memory at the most; /health within {slowest * 1000:.0f} ms; cut off after 30 s",
        {"readers": readers, "memory-bytes": most, "health-seconds": slowest},
    )


def lock_attack(directory: Path, waiting: int = 100) -> Attack:
    """Let many requests wait for one repository."""
    with running_hub(directory / "hub", *OPTIONS) as hub:
        create_kernel(hub, "a/held", {"x": "x"})
        create_kernel(hub, "a/free", {"x": "x"})
        statuses: list[int] = []

        def commit(number: int) -> None:
            statuses.append(commit_files(hub, "a/held", {"x": str(number)}).status_code)

        held = locks.repository_lock(directory / "hub/repositories/a/held.git", "a/held")
        with ThreadPoolExecutor(waiting) as clients, held:
            for number in range(waiting):
                clients.submit(commit, number)
            slowest = slowest_health(hub, lambda: time.sleep(3))
            began = time.perf_counter()
            commit_files(hub, "a/free", {"y": "y"}).raise_for_status()
            free = time.perf_counter() - began
        counted = {str(status): statuses.count(status) for status in sorted(set(statuses))}
    return Attack(
        "waiting for a locked repository",
        f"{waiting} commits to a repository whose lock another process holds for 3 s",
        f"/health within {slowest * 1000:.0f} ms, a commit to another repository in {free * 1000:.0f} ms; "
        f"answers in the end: {counted}",
        {"health-seconds": slowest, "other-commit-seconds": free, "statuses": counted},
    )


def scale(directory: Path, repositories: int) -> Attack:
    """Measure routes beside 10 and many repositories of 50 versions."""
    seconds: dict[str, dict[str, float]] = {}
    memory: dict[str, int] = {}
    built = 0.0
    for count in (10, repositories):
        root = directory / str(count)
        fill(root, count)
        began = time.perf_counter()
        Hub(Settings(root))
        built = time.perf_counter() - began
        with running_hub(root, *OPTIONS) as hub:
            seconds[str(count)] = {route: _median(hub, route) for route in _routes()}
            memory[str(count)] = hub.peak_bytes()
    slowest = max(seconds[str(repositories)], key=lambda route: seconds[str(repositories)][route])
    ratio = memory[str(repositories)] / memory["10"]
    return Attack(
        "many repositories",
        f"{repositories} repositories of 50 versions each; every route that reads, median of 9",
        f"slowest: {slowest}, {seconds[str(repositories)][slowest] * 1000:.0f} ms; {ratio:.2f} times the memory of "
        f"10 repositories; the index is built in {built:.0f} s, once",
        {"seconds": seconds, "memory-bytes": memory, "index-seconds": built},
    )


def _routes() -> list[str]:
    kernel = "/api/kernels/org1/k1"
    return [
        "/",
        "/?search=k99",
        "/api/kernels",
        "/api/kernels?limit=1000",
        "/api/kernels?search=k99",
        "/api/kernels?author=org1",
        "/api/organizations/org1/overview",
        "/api/whoami-v2",
        kernel,
        f"{kernel}/refs",
        f"{kernel}/tree/v50?recursive=true&expand=true",
        f"{kernel}/commits/v50",
        "/kernels/org1/k1",
        "/kernels/org1/k1/resolve/v50/README.md",
        "/health",
    ]


def _median(hub: HubProcess, route: str) -> float:
    session = requests.Session()
    times = []
    for _ in range(9):
        began = time.perf_counter()
        session.get(hub.url + route, headers=HEADERS, timeout=60).raise_for_status()
        times.append(time.perf_counter() - began)
    return sorted(times)[4]


def fill(root: Path, count: int) -> None:
    """Create repositories with 50 versions each; their files are links to those of one."""
    hub = Hub(Settings(root))
    hub.repositories.create("org0/k0", private=False, author="a")
    first = hub.repositories.open("org0/k0")
    blob = first.commits.write_blob(b"# K\n\nA kernel for tests.\n")
    first.commits.create("main", [FileChange("README.md", blob)], title="t", description="", author="a")
    for version in range(1, 51):
        first.refs.create_branch(f"v{version}", "main", empty=False, overwrite=False)
    subprocess.run(["git", "-C", first.path, "gc", "-q"], check=True)
    shutil.rmtree(first.path / "hooks")
    for number in range(1, count):
        path = root / f"repositories/org{number % 100}/k{number}.git"
        shutil.copytree(first.path, path, copy_function=os.link)
    (root / "index.sqlite").unlink()


def expansion_attack(directory: Path) -> Attack:
    """Describe many bytes by a small shard."""
    with running_hub(directory / "hub", *OPTIONS, "--repository-quota", "100") as hub:
        create_kernel(hub, "a/one", {"x": "x"})
        size = 20_000 * MB
        body = {"operation": "upload", "objects": [{"oid": hashlib.sha256(b"x").hexdigest(), "size": size}]}
        lfs = requests.post(
            f"{hub.url}/kernels/a/one.git/info/lfs/objects/batch", json=body, headers=HEADERS, timeout=10
        )
        commit = commit_files(hub, "a/one", {str(number): os.urandom(2 * MB).hex() for number in range(40)})
    stored = sum(path.stat().st_size for path in (directory / "hub").rglob("*") if path.is_file())
    return Attack(
        "more than the quota",
        "a repository with a quota of 100 MB: 20 GB announced by LFS; 160 MB in one commit",
        f"answers {lfs.status_code} and {commit.status_code}; {stored / MB:.0f} MB on the disk",
        {"statuses": [lfs.status_code, commit.status_code], "stored-bytes": stored},
    )


ATTACKS = {
    "yaml": yaml_attack,
    "cards": cards_attack,
    "heads": heads_attack,
    "readers": readers_attack,
    "lock": lock_attack,
    "quota": expansion_attack,
}

LONG = {"housekeeping": housekeeping, "soak": soak}


@click.command()
@click.option("--only", multiple=True, type=click.Choice([*ATTACKS, "scale", *LONG]), help="Only these.")
@click.option("--repositories", default=10_000, show_default=True, help="Repositories of `scale`.")
@click.option("--seconds", default=300.0, show_default=True, help="Length of `housekeeping` and `soak`.")
@click.option("--json", "output", type=click.Path(path_type=Path), required=True, help="The file to write.")
def main(only: tuple[str, ...], repositories: int, seconds: float, output: Path) -> None:
    """Attack a Hub, and write what happens."""
    threading.stack_size(256 << 10)
    done: dict[str, Any] = {}
    for name in only or (*ATTACKS, "scale", *LONG):
        with tempfile.TemporaryDirectory(prefix="hub-attacks-") as temporary:
            if name in LONG:
                done[name] = LONG[name](Path(temporary), seconds)
            else:
                directory = Path(temporary)
                attack = scale(directory, repositories) if name == "scale" else ATTACKS[name](directory)
                done[name] = asdict(attack)
        click.echo(f"{name}: {done[name]['result']}")
    result_files.write(output, {"machine": machine(), "date": time.strftime("%Y-%m-%d"), **done})


if __name__ == "__main__":
    main()
