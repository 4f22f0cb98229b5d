"""A soak of the Hub: 64 clients, git's housekeeping, `hub check`, kills and a full disk, for as long as wanted.

`housekeeping` is the same without readers, kills and the full disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sqlite3
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import requests
from hub_process import HEADERS, start_hub

from kernel_hub import mend
from kernel_hub.hub_service import Hub
from kernel_hub.settings import Settings

REPOSITORIES = ["soak/k0", "soak/k1", "soak/k2", "soak/k3"]
WRITERS = 8
READERS = 56
DISK_MB = 1000
KILL_SECONDS = 15.0
FULL_SECONDS = 60.0
LARGE_BYTES = 50_000


class Soak:
    """What runs, and what was acknowledged."""

    def __init__(self, disk: Path) -> None:
        self.disk = disk
        self.root = disk / "hub"
        self.stop = threading.Event()
        self.full = threading.Event()
        self.statuses: Counter[str] = Counter()
        self.unexpected: Counter[str] = Counter()
        self.events: Counter[str] = Counter()
        self.commits: dict[str, list[str]] = {}
        self.files: dict[tuple[str, str], str] = {}
        self.slowest_health = 0.0
        self.hub = start_hub(self.root, "--log-level", "error")

    @property
    def url(self) -> str:
        """The address, which stays the same when the server is started again."""
        return self.hub.url

    def restart(self) -> None:
        """Kill the server, and start it on the port that it had."""
        self.hub.kill()
        self.hub = start_hub(self.root, "--port", self.url.rpartition(":")[2], "--log-level", "error")

    def ask(self, session: requests.Session, method: str, path: str, **options: Any) -> requests.Response | None:
        """Send a request, and count its answer. None: the server was killed meanwhile."""
        url = path if path.startswith("http") else self.url + path
        full = self.full.is_set()
        try:
            answer = session.request(method, url, headers=HEADERS, timeout=60, **options)
        except requests.RequestException:
            self.statuses["cut"] += 1
            time.sleep(0.1)
            return None
        self.statuses[f"{'write' if method != 'GET' else 'read'} {answer.status_code}"] += 1
        expected = answer.ok or answer.status_code == 503 or (answer.status_code in {413, 507} and full)
        if not expected and not (self.full.is_set() and answer.status_code in {413, 507}):
            self.unexpected[f"{method} {answer.status_code} {answer.text[:120]}"] += 1
        return answer

    def write(self, number: int) -> None:
        """Commit small and large files until the end."""
        session, step = requests.Session(), 0
        while not self.stop.is_set():
            step += 1
            repo_id = REPOSITORIES[(number + step) % len(REPOSITORIES)]
            path = f"{number}-{step % 20}.bin"
            line, digest = self._file(session, repo_id, path, f"{number} {step}", large=step % 2 == 0)
            if line is None:
                continue
            header = {"key": "header", "value": {"summary": path}}
            body = f"{json.dumps(header)}\n{json.dumps(line)}"
            answer = self.ask(session, "POST", f"/api/kernels/{repo_id}/commit/main", data=body)
            if answer is not None and answer.ok:
                self.commits.setdefault(repo_id, []).append(answer.json()["commitOid"])
                self.files[repo_id, path] = digest
            else:
                self.files.pop((repo_id, path), None)  # may have been made, though nobody was told

    def _file(
        self, session: requests.Session, repo_id: str, path: str, text: str, *, large: bool
    ) -> tuple[dict[str, Any] | None, str]:
        if not large:
            digest = hashlib.sha256(text.encode()).hexdigest()
            return {"key": "file", "value": {"path": path, "content": text}}, digest
        data = os.urandom(LARGE_BYTES)
        digest = hashlib.sha256(data).hexdigest()
        wanted = {"operation": "upload", "objects": [{"oid": digest, "size": len(data)}]}
        batch = self.ask(session, "POST", f"/kernels/{repo_id}.git/info/lfs/objects/batch", json=wanted)
        if batch is None or not batch.ok:
            return None, digest
        sent = self.ask(session, "PUT", batch.json()["objects"][0]["actions"]["upload"]["href"], data=data)
        if sent is None or not sent.ok:
            return None, digest
        return {"key": "lfsFile", "value": {"path": path, "algo": "sha256", "oid": digest, "size": len(data)}}, digest

    def read(self, number: int) -> None:
        """Read until the end, as clients and people do."""
        session, chosen = requests.Session(), random.Random(number)
        while not self.stop.is_set():
            repo_id = chosen.choice(REPOSITORIES)
            routes = [
                f"/api/kernels/{repo_id}/refs",
                f"/api/kernels/{repo_id}/tree/main?recursive=true",
                f"/kernels/{repo_id}/resolve/main/.gitattributes",
                "/api/organizations/soak/overview",
                "/",
                f"/kernels/{repo_id}",
            ]
            self.ask(session, "GET", chosen.choice(routes))
            time.sleep(chosen.uniform(0, 0.2))

    def watch(self) -> None:
        """Measure /health until the end."""
        while not self.stop.is_set():
            began = time.perf_counter()
            with suppress(requests.RequestException):
                requests.get(f"{self.url}/health", timeout=60)
                self.slowest_health = max(self.slowest_health, time.perf_counter() - began)
            time.sleep(0.2)

    def pack(self, *command: str) -> None:
        """Run a command of git in every repository until the end."""
        while not self.stop.is_set():
            for repo_id in REPOSITORIES:
                git = ["git", "-C", str(self.root / "repositories" / f"{repo_id}.git")]
                done = subprocess.run([*git, *command], capture_output=True, check=False)
                self.events[f"git {command[0]}, {'done' if done.returncode == 0 else 'refused'}"] += 1
            self.stop.wait(0.5)

    def mend(self) -> None:
        """Run what `hub check` runs until the end."""
        while not self.stop.is_set():
            try:
                defects = list(mend.find_defects(Hub(Settings(self.root))))
                self.events["hub check"] += 1
                for defect in defects:
                    if not defect.mended and "run this again" not in defect.what:
                        self.unexpected[f"hub check: {defect.what}"] += 1
            except (OSError, sqlite3.OperationalError):  # such as the staging directory
                self.events["hub check, disk full"] += 1
            self.stop.wait(3)

    def fill_disk(self) -> None:
        """Fill the disk for some seconds, again and again, until the end."""
        filling = self.disk / "filling"
        while not self.stop.wait(FULL_SECONDS):
            self.full.set()
            with suppress(OSError), filling.open("wb", buffering=0) as file:
                while file.write(bytes(1 << 20)):
                    pass
            self.events["disk full"] += 1
            self.stop.wait(5)
            filling.unlink()
            time.sleep(1)
            self.full.clear()

    def kill_often(self) -> None:
        """Kill the server and start it again, until the end."""
        while not self.stop.wait(random.uniform(0.5, 1.5) * KILL_SECONDS):
            if self.full.is_set():
                continue
            self.restart()
            self.events["kill -9"] += 1


@contextmanager
def small_disk(directory: Path) -> Iterator[Path]:
    """Mount a disk of its own, so that it can be full."""
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(directory)], check=True)
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


def soak(directory: Path, seconds: float) -> dict[str, Any]:
    """Run everything at once for some seconds, and compare what was acknowledged with what is found."""
    with small_disk(directory / "disk") as disk:
        return _run(Soak(disk), seconds, readers=READERS, disturbed=True)


def housekeeping(directory: Path, seconds: float) -> dict[str, Any]:
    """Write beside git's housekeeping and `hub check`, on an ordinary disk."""
    return _run(Soak(directory), seconds, readers=0, disturbed=False)


def _run(run: Soak, seconds: float, *, readers: int, disturbed: bool) -> dict[str, Any]:
    for repo_id in REPOSITORIES:
        run.hub.create(repo_id)
    jobs: list[tuple[Callable[..., None], ...]] = [(run.watch,), (run.mend,)]
    if disturbed:
        jobs += [(run.fill_disk,), (run.kill_often,)]
    jobs += [(run.write, number) for number in range(WRITERS)]  # type: ignore[misc]
    jobs += [(run.read, number) for number in range(readers)]  # type: ignore[misc]
    jobs += [(run.pack, "gc", "-q"), (run.pack, "pack-refs", "--all", "--prune"), (run.pack, "repack", "-adq")]  # type: ignore[list-item]
    with ThreadPoolExecutor(len(jobs)) as at_once:
        running = [at_once.submit(*job) for job in jobs]
        time.sleep(seconds)
        run.stop.set()
    for job in running:
        job.result()
    try:
        return {"seconds": seconds, **_found(run)}
    finally:
        run.hub.kill()


def _found(run: Soak) -> dict[str, Any]:
    lost = 0
    for repo_id, commits in run.commits.items():
        git = ["git", "-C", str(run.root / "repositories" / f"{repo_id}.git")]
        # A damaged repository has less history, or none.
        history = subprocess.run([*git, "rev-list", "--all"], capture_output=True, text=True, check=False).stdout
        lost += len(set(commits) - set(history.split()))
    wrong = 0
    for (repo_id, path), digest in run.files.items():
        content = requests.get(f"{run.url}/kernels/{repo_id}/resolve/main/{path}", timeout=60).content
        wrong += hashlib.sha256(content).hexdigest() != digest
    acknowledged = sum(len(commits) for commits in run.commits.values())
    unmended = [
        f"{defect.where}: {defect.what}"
        for defect in mend.find_defects(Hub(Settings(run.root)), digests=True)
        if not defect.mended
    ]
    return {
        "result": f"{acknowledged} commits acknowledged, {lost} lost; {len(run.files)} files, {wrong} wrong; "
        f"{sum(run.unexpected.values())} unexpected answers; /health within {run.slowest_health * 1000:.0f} ms",
        "acknowledged": acknowledged,
        "lost": lost,
        "files": len(run.files),
        "wrong": wrong,
        "unexpected": dict(run.unexpected.most_common(20)),
        "damage": unmended,
        "answers": dict(run.statuses),
        "events": dict(run.events),
        "health-seconds": run.slowest_health,
    }
