"""Kills a Hub and `hub gc` at random moments of uploads, commits, moves and deletions, and looks for what is lost.

.venv/bin/python benchmarks/hub_kills.py --seconds 120 --json benchmarks/results/hub-kills.json
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import requests
import result_files
from hub_process import HEADERS, start_hub

from kernel_hub import mend
from kernel_hub.hub_service import Hub
from kernel_hub.settings import Settings

WORKERS = 6
EXPECTED = {503}  # locks are held, or the server is starting


class Owner:
    """A client that alone changes its repository, and knows what was acknowledged."""

    def __init__(self, run: Run, number: int) -> None:
        self.run = run
        self.number = number
        self.moves = 0
        self.name = ""
        self.files: dict[str, str] = {}
        self.commits: list[str] = []

    def live(self) -> None:
        """Change the repository until the end."""
        while not self.run.stop.is_set():
            if not self.name:
                self._create()
            else:
                random.choices([self._commit, self._move, self._delete], [12, 4, 1])[0]()

    def _new_name(self) -> str:
        self.moves += 1
        return f"org{self.number % 2}/k{self.number}-{self.moves}"

    def _create(self) -> None:
        name = self._new_name()
        organization, repository = name.split("/")
        body = {"name": repository, "organization": organization, "type": "kernel"}
        if self.run.ask("POST", "/api/repos/create", json=body) is not None:
            self.name, self.files, self.commits = name, {}, []

    def _commit(self) -> None:
        data = os.urandom(40_000)
        digest = hashlib.sha256(data).hexdigest()
        path = f"{random.randrange(10)}.so"
        wanted = {"operation": "upload", "objects": [{"oid": digest, "size": len(data)}]}
        batch = self.run.ask("POST", f"/kernels/{self.name}.git/info/lfs/objects/batch", json=wanted)
        if batch is None:
            return
        address = batch["objects"][0]["actions"]["upload"]["href"]
        if self.run.ask("PUT", address[len(self.run.url) :], data=data) is None:
            return
        lines = [
            {"key": "header", "value": {"summary": path}},
            {"key": "lfsFile", "value": {"path": path, "algo": "sha256", "oid": digest, "size": len(data)}},
        ]
        body = "\n".join(map(json.dumps, lines))
        self.files.pop(path, None)  # if nobody is told, it may have changed or not
        done = self.run.ask("POST", f"/api/kernels/{self.name}/commit/main", data=body, also={400})  # `hub gc` took it
        if done is not None and "commitOid" in done:
            self.commits.append(done["commitOid"])
            self.files[path] = digest

    def _move(self) -> None:
        before, after = self.name, self._new_name()
        body = {"fromRepo": before, "toRepo": after, "type": "kernel"}
        if self.run.ask("POST", "/api/repos/move", json=body) is not None:
            self.name = after
        elif self.run.exists(after):
            self.name = after
            if self.run.exists(before):
                self.run.faults[f"{before} is still there after its move"] += 1

    def _delete(self) -> None:
        organization, repository = self.name.split("/")
        body = {"name": repository, "organization": organization, "type": "kernel"}
        done = self.run.ask("DELETE", "/api/repos/delete", json=body)
        if done is not None or not self.run.exists(self.name):
            self.name = ""


class Run:
    """One Hub, killed again and again."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.stop = threading.Event()
        self.events: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.hub = start_hub(root, "--log-level", "error")
        self.url = self.hub.url

    def ask(self, method: str, path: str, also: set[int] | None = None, **options: Any) -> dict[str, Any] | None:
        """Send a request, and return its answer; None if it was refused or nobody knows."""
        try:
            answer = requests.request(method, self.url + path, headers=HEADERS, timeout=30, **options)
        except requests.RequestException:
            self.events["cut"] += 1
            time.sleep(0.1)
            return None
        self.events[f"{method} {answer.status_code}"] += 1
        if not answer.ok and answer.status_code not in EXPECTED | (also or set()):
            self.faults[f"{method} {path.split('?', maxsplit=1)[0]} {answer.status_code} {answer.text[:150]}"] += 1
        if not answer.ok:
            return None
        return dict(answer.json()) if answer.content else {}

    def exists(self, name: str) -> bool:
        """Return whether a repository has this name now, without redirects."""
        while True:
            with suppress(requests.RequestException):
                url = f"{self.url}/api/kernels/{name}"
                return requests.get(url, headers=HEADERS, timeout=30, allow_redirects=False).status_code == 200
            time.sleep(0.1)

    def kill_often(self) -> None:
        """Kill the server and start it again, until the end."""
        while not self.stop.wait(random.uniform(0.5, 4)):
            self.hub.kill()
            self.hub = start_hub(self.root, "--port", self.url.rpartition(":")[2], "--log-level", "error")
            self.events["kill -9"] += 1

    def collect_often(self) -> None:
        """Run `hub gc`, and kill it half of the time, until the end."""
        command = [sys.executable, "-m", "kernel_builder", "hub", "gc", "--root", str(self.root), "--unused", "0"]
        while not self.stop.wait(1):
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            try:
                process.wait(timeout=random.choice([1.5, 2.0, 30.0]))
                self.events["hub gc"] += 1
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                self.events["hub gc, killed"] += 1


@click.command()
@click.option("--seconds", default=120.0, show_default=True)
@click.option("--json", "to", type=click.Path(path_type=Path), help="Write the results to a file.")
def main(seconds: float, to: Path | None) -> None:
    """Kill a Hub of this checkout at random moments."""
    with tempfile.TemporaryDirectory() as directory:
        run = Run(Path(directory, "hub"))
        owners = [Owner(run, number) for number in range(WORKERS)]
        with ThreadPoolExecutor(WORKERS + 2) as pool:
            jobs = [pool.submit(owner.live) for owner in owners]
            jobs += [pool.submit(run.kill_often), pool.submit(run.collect_often)]
            time.sleep(seconds)
            run.stop.set()
        for job in jobs:
            job.result()
        lost, wrong, files = 0, 0, 0
        for owner in owners:
            if not owner.name:
                continue
            path = run.root / "repositories" / f"{owner.name}.git"
            git = ["git", "-C", str(path), "rev-list", "--all"]
            history = subprocess.run(git, capture_output=True, text=True, check=False).stdout.split()
            lost += len(set(owner.commits) - set(history))
            for file, digest in owner.files.items():
                url = f"{run.url}/kernels/{owner.name}/resolve/main/{file}"
                answer = requests.get(url, headers=HEADERS, timeout=30)
                if hashlib.sha256(answer.content).hexdigest() != digest:
                    wrong += 1
                    run.faults[f"{file} of {owner.name}: {answer.status_code} {answer.text[:150]}"] += 1
                files += 1
        run.hub.kill()
        defects = list(mend.find_defects(Hub(Settings(run.root)), digests=True, now=time.time() + 3600))
        damage = [f"{defect.where}: {defect.what}" for defect in defects if not defect.mended]
    result = {
        "seconds": seconds,
        "result": f"{lost} commits lost; {files} files, {wrong} wrong; {sum(run.faults.values())} unexpected answers; "
        f"{len(damage)} defects that cannot be mended",
        "events": dict(run.events),
        "unexpected": dict(run.faults.most_common(20)),
        "damage": damage,
    }
    click.echo(json.dumps(result, indent=2))
    if to is not None:
        result_files.write(to, result)


if __name__ == "__main__":
    main()
