"""Clients change repositories while the Hub server and its housekeeping get SIGKILL: acknowledged changes remain."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import requests

from tests.nightly.conftest import SECONDS
from tests.support import programs
from tests.support.running_hub import TOKEN, RunningHub

pytestmark = [pytest.mark.attack, pytest.mark.nightly, pytest.mark.timeout(1800)]

CLIENTS = 6
HUB = [sys.executable, "-m", "kernel_builder", "hub"]


class Owner:
    """A client that alone changes its repository, and records the acknowledged changes."""

    def __init__(self, run: Run, number: int) -> None:
        self.run = run
        self.number = number
        self.names = 0
        self.name = ""
        self.files: dict[str, str] = {}
        self.commits: list[str] = []

    def change_repeatedly(self) -> None:
        while not self.run.stop.is_set():
            if self.name:
                random.choices([self._commit, self._move, self._delete], [12, 4, 1])[0]()
            else:
                self._create()

    def _new_name(self) -> str:
        self.names += 1
        return f"org{self.number % 2}/k{self.number}-{self.names}"

    def _create(self) -> None:
        name = self._new_name()
        if self.run.request("POST", "/api/repos/create", json=_described(name)) is not None:
            self.name, self.files, self.commits = name, {}, []

    def _commit(self) -> None:
        data = os.urandom(40_000)
        digest, path = hashlib.sha256(data).hexdigest(), f"{random.randrange(10)}.so"
        wanted = {"operation": "upload", "objects": [{"oid": digest, "size": len(data)}]}
        batch = self.run.request("POST", f"/kernels/{self.name}.git/info/lfs/objects/batch", json=wanted)
        if batch is None:
            return
        address = batch["objects"][0]["actions"]["upload"]["href"].removeprefix(self.run.hub.url)
        if self.run.request("PUT", address, data=data) is None:
            return
        lines = [
            {"key": "header", "value": {"summary": path}},
            {"key": "lfsFile", "value": {"path": path, "algo": "sha256", "oid": digest, "size": len(data)}},
        ]
        self.files.pop(path, None)  # without a response, the file may have changed or not
        body = "\n".join(map(json.dumps, lines))
        # 400: `hub gc --unused 0` has removed the uploaded file.
        done = self.run.request("POST", f"/api/kernels/{self.name}/commit/main", data=body, expected={400})
        if done is not None and "commitOid" in done:
            self.commits.append(done["commitOid"])
            self.files[path] = digest

    def _move(self) -> None:
        before, after = self.name, self._new_name()
        body = {"fromRepo": before, "toRepo": after, "type": "kernel"}
        if self.run.request("POST", "/api/repos/move", json=body) is not None:
            self.name = after
        elif self.run.exists(after):
            self.name = after
            if self.run.exists(before):
                self.run.faults[f"{before} exists after its move to {after}"] += 1

    def _delete(self) -> None:
        done = self.run.request("DELETE", "/api/repos/delete", json=_described(self.name))
        if done is not None or not self.run.exists(self.name):
            self.name = ""


def _described(repo_id: str) -> dict[str, str]:
    organization, name = repo_id.split("/")
    return {"name": name, "organization": organization, "type": "kernel"}


class Run:
    """A Hub server that is killed and restarted, with the unexpected responses."""

    def __init__(self, start_hub: Callable[..., RunningHub]) -> None:
        self.start_hub = start_hub
        self.hub = start_hub()
        self.stop = threading.Event()
        self.events: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()

    def request(
        self, method: str, path: str, expected: frozenset[int] | set[int] = frozenset(), **options: Any
    ) -> dict[str, Any] | None:
        """Send a request and return the response; None if the server refused it or was killed."""
        try:
            response = requests.request(method, self.hub.url + path, headers=TOKEN, timeout=30, **options)
        except requests.RequestException:
            time.sleep(0.1)
            return None
        if response.ok:
            self.events[method] += 1
            return dict(response.json()) if response.content else {}
        # 503: a lock is held, or the server is starting.
        if response.status_code not in {503, *expected}:
            self.faults[f"{method} {path.partition('?')[0]} {response.status_code} {response.text[:150]}"] += 1
        return None

    def exists(self, repo_id: str) -> bool:
        """Return whether a repository has this name now, without redirects."""
        while True:
            with suppress(requests.RequestException):
                url = f"{self.hub.url}/api/kernels/{repo_id}"
                return requests.get(url, headers=TOKEN, timeout=30, allow_redirects=False).status_code == 200
            time.sleep(0.1)

    def kill_server(self) -> None:
        while not self.stop.wait(random.uniform(0.5, 4)):
            self.hub.kill()
            self.hub = self.start_hub("--port", self.hub.url.rpartition(":")[2])
            self.events["kill"] += 1

    def run_repeatedly(self, *arguments: str, kill: bool) -> None:
        """Run a command of the Hub; with `kill`, half of the runs get SIGKILL."""
        while not self.stop.wait(1):
            process = subprocess.Popen(
                [*HUB, *arguments, "--root", str(self.hub.root)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            try:
                output = process.communicate(timeout=random.choice([1.5, 60]) if kill else 60)[0].decode()
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                continue
            self.events[arguments[0]] += 1
            if process.returncode and "run this again" not in output:
                self.faults[f"{' '.join(arguments)}: {output[-300:]}"] += 1

    def pack_repeatedly(self) -> None:
        """Run git's housekeeping in every repository; it fails where a repository moves meanwhile."""
        while not self.stop.wait(0.5):
            for repository in (self.hub.root / "repositories").glob("*/*.git"):
                for command in (["gc", "-q"], ["pack-refs", "--all", "--prune"], ["repack", "-adq"]):
                    subprocess.run(["git", "-C", str(repository), *command], capture_output=True, check=False)
            self.events["git"] += 1


def test_kills_lose_no_acknowledged_change(start_hub: Callable[..., RunningHub]) -> None:
    run = Run(start_hub)
    owners = [Owner(run, number) for number in range(CLIENTS)]
    with ThreadPoolExecutor(CLIENTS + 4) as pool:
        jobs = [pool.submit(owner.change_repeatedly) for owner in owners]
        jobs += [pool.submit(run.kill_server), pool.submit(run.pack_repeatedly)]
        jobs += [
            pool.submit(run.run_repeatedly, "gc", "--unused", "0", kill=True),
            pool.submit(run.run_repeatedly, "check", kill=False),
        ]
        time.sleep(SECONDS)
        run.stop.set()
    for job in jobs:
        job.result()
    for owner in owners:
        if owner.name:
            repository = run.hub.root / "repositories" / f"{owner.name}.git"
            history = subprocess.check_output(["git", "-C", str(repository), "rev-list", "--all"], text=True).split()
            assert set(owner.commits) <= set(history)
            for path, digest in owner.files.items():
                url = f"{run.hub.url}/kernels/{owner.name}/resolve/main/{path}"
                content = requests.get(url, headers=TOKEN, timeout=30).content
                assert hashlib.sha256(content).hexdigest() == digest, f"{path} of {owner.name}"
    assert not run.faults
    assert run.events.keys() >= {"POST", "PUT", "kill", "gc", "check", "git"}
    run.hub.kill()
    programs.run(*HUB, "check", "--digests", "--root", run.hub.root)
