"""Fuzzes every route of a Hub by its OpenAPI description and by hand, and counts what should not be.

    .venv/bin/python benchmarks/hub_fuzz.py --seconds 600 --json benchmarks/results/hub-fuzz.json

Half of the requests are for a kernel that exists. No answer may be a 500, nothing may be logged as an error, and the
memory may not grow with the requests.
"""

from __future__ import annotations

import json
import os
import random
import re
import socket
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import click
import requests
import result_files
import schemathesis
from hub_process import HEADERS, HubProcess, running_hub
from hypothesis import HealthCheck, given, settings, strategies

KERNEL = ("fuzz", "kernel")
KNOWN = {"organization": KERNEL[0], "name": KERNEL[1], "revision": "main"}
ODD = ["%00", "%ED%A0%80", "%2e%2e", "%252e", "%0d%0aX:1", "%F0%9F%92%A9", "a" * 4000, "-1", "1e400", "~", "*", "%7F"]
GIT_LINES = [
    *(b"command=fetch", b"command=ls-refs", b"command=object-info", b"command=x", b"agent=x", b"object-format=sha256"),
    *(b"want " + b"1" * 40, b"want-ref refs/heads/main", b"have " + b"0" * 40, b"shallow " + b"1" * 40, b"deepen -1"),
    *(b"deepen 99999999999", b"deepen-since 1e9", b"deepen-not x", b"filter sparse:oid=x", b"filter tree:99999"),
    *(
        b"ref-prefix " + b"a" * 900,
        b"peel",
        b"symrefs",
        b"unborn",
        b"oid " + b"1" * 40,
        b"size",
        b"done",
        b"wait-for-done",
    ),
    *(b"packfile-uris x", b"sideband-all", b"thin-pack", b"0000", b"0001", b"0002", b"0003", b"x" * 60_000),
]


@schemathesis.serializer("application/x-ndjson")
def commit_lines(context: object, value: object) -> bytes:
    """Serialize a generated value as lines of a commit, which may be malformed."""
    return f'{{"key": "header", "value": {{"summary": "s"}}}}\n{value}'.encode("utf-8", "surrogatepass")


class Fuzz:
    """What was sent, and what was answered."""

    def __init__(self, hub: HubProcess, seconds: float) -> None:
        self.hub = hub
        self.until = time.monotonic() + seconds
        self.statuses: Counter[int] = Counter()
        self.faults: Counter[str] = Counter()
        self.paths = list(requests.get(f"{hub.url}/openapi.json", timeout=10).json()["paths"])

    def note(self, status: int, what: str) -> None:
        """Count an answer."""
        self.statuses[status] += 1
        if status in {0, 500, 502, 504}:
            self.faults[f"{status} {what}"[:300]] += 1

    def by_description(self) -> None:
        """Send generated requests to each route."""
        description = schemathesis.openapi.from_url(f"{self.hub.url}/openapi.json")
        for operation in description.get_all_operations():
            if time.monotonic() > self.until:
                return
            self._one_route(operation.ok())  # type: ignore[union-attr]
            for _ in range(10):
                self.by_hand()
            for _ in range(3):
                self.by_git()

    def _one_route(self, operation: Any) -> None:
        @given(case=operation.as_strategy(), exists=strategies.booleans())
        @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        def send(case: Any, exists: bool) -> None:
            if exists:
                case.path_parameters.update({key: KNOWN[key] for key in KNOWN.keys() & case.path_parameters.keys()})
            try:
                answer = case.call(headers=HEADERS, timeout=60)
            except (requests.RequestException, UnicodeError, ValueError) as error:
                if isinstance(error, requests.ConnectionError):
                    self.note(0, f"{operation.label}: {error}")
                return
            self.note(answer.status_code, case.as_curl_command())

        send()

    def by_hand(self) -> None:
        """Send a request that no library would send."""
        path = random.choice(self.paths)
        path = re.sub(
            r"\{(\w+)(:path)?\}",
            lambda parameter: KNOWN.get(parameter[1], "x") if random.random() < 0.6 else random.choice(ODD),
            path,
        )
        query = random.choice(["", "", "?cursor=" + random.choice(ODD), "?expand=1&recursive=1", "?p=1000000", "?%00"])
        method = random.choice(["GET", "GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
        body = random.choice([b"", b"{}", b"[" * 5000, os.urandom(300), b'{"name": "\\ud800"}', b"\n" * 50])
        head = random.choice(["", "Range: bytes=5-1\r\n", "Range: bytes=-0\r\n", "Authorization: Basic AA==\r\n"])
        head += random.choice(
            ["", "Content-Type: application/json\r\n", "Content-Encoding: gzip\r\n", "If-Range: x\r\n"]
        )
        host, port = self.hub.url.removeprefix("http://").split(":")
        request = (
            f"{method} {path}{query} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer any\r\nConnection: close\r\n"
            f"{head}Content-Length: {len(body)}\r\n\r\n"
        )
        try:
            with socket.create_connection((host, int(port)), timeout=60) as connection:
                connection.sendall(request.encode("latin-1") + body)
                answer = connection.recv(100)
            self.note(int(answer.split()[1]) if answer else 0, request[:200])
        except ConnectionError:  # the rest of a body that was refused
            self.statuses[-1] += 1

    def by_git(self) -> None:
        """Send lines of git's protocol in any order, of which some are broken."""
        lines = [random.choice(GIT_LINES) for _ in range(random.randrange(1, 8))]
        body = b"".join(line if len(line) == 4 else b"%04x%s" % (len(line) + 4, line) for line in lines) + b"0000"
        if random.random() < 0.5:
            place = random.randrange(len(body))
            body = body[:place] + random.choice([os.urandom(3), b"ffff", b"\0", b""]) + body[place + 2 :]
        kind = {
            "Content-Type": "application/x-git-upload-pack-request",
            "Git-Protocol": random.choice(["version=2", "version=2", "version=1", "version=0", ":"]),
        }
        address = f"{self.hub.url}/kernels/{'/'.join(KERNEL)}/git-upload-pack"
        answer = requests.post(address, data=body, headers={**HEADERS, **kind}, timeout=60)
        self.note(answer.status_code, f"git {body[:100]!r}")


def kilobytes(hub: HubProcess) -> int:
    """Return the resident memory of the server."""
    resident = re.search(r"VmRSS:\s*(\d+) kB", Path(f"/proc/{hub.process.pid}/status").read_text())
    assert resident is not None
    return int(resident[1])


def create(hub: HubProcess) -> None:
    """Create the kernel that half of the requests are for, if it does not exist."""
    organization, name = KERNEL
    body = {"name": name, "organization": organization, "type": "kernel"}
    requests.post(f"{hub.url}/api/repos/create", json=body, headers=HEADERS, timeout=30)
    lines = [{"key": "header", "value": {"summary": "s"}}]
    lines += [{"key": "file", "value": {"path": f"build/torch-cpu/f{n}.py", "content": "x = 1\n"}} for n in range(50)]
    commit = "\n".join(map(json.dumps, lines))
    requests.post(f"{hub.url}/api/kernels/{organization}/{name}/commit/main", data=commit, headers=HEADERS, timeout=30)


@click.command()
@click.option("--seconds", default=600.0, show_default=True)
@click.option("--json", "to", type=click.Path(path_type=Path), help="Write the results to a file.")
def main(seconds: float, to: Path | None) -> None:
    """Fuzz a Hub of this checkout."""
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory, "log")
        with running_hub(Path(directory, "hub"), "--idle-timeout", "5", log=log) as hub:
            create(hub)
            fuzz = Fuzz(hub, seconds)
            rounds, before = 0, 0
            while time.monotonic() < fuzz.until:
                fuzz.by_description()
                create(hub)  # a request may have deleted it
                rounds += 1
                before = before or kilobytes(hub)  # after one round: the modules are loaded, and the caches exist
            after = kilobytes(hub)
            healthy = requests.get(f"{hub.url}/health", timeout=10).ok
        wrong = re.compile(r'Traceback \(most recent|"level": "(error|critical|warning)"')
        errors = [line for line in log.read_text().splitlines() if wrong.search(line)]
    result = {
        "seconds": seconds,
        "requests": sum(fuzz.statuses.values()),
        "rounds": rounds,
        "answers": {str(status): count for status, count in sorted(fuzz.statuses.items())},
        "faults": dict(fuzz.faults.most_common(30)),
        "errors-in-log": len(errors),
        "first-errors": [line[:2000] for line in errors[:5]],
        "memory-kB": {"after-the-first-round": before, "at-the-end": after},
        "healthy": healthy,
    }
    click.echo(json.dumps(result, indent=2))
    if to is not None:
        result_files.write(to, result)


if __name__ == "__main__":
    main()
