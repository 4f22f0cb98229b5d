"""Runs the Hub of this checkout in a process of its own, for the scripts that measure it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import requests

# A server without a token file accepts any token from this machine.
TOKEN = "any"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}


@dataclass(frozen=True)
class HubProcess:
    """A Hub that accepts requests."""

    url: str
    process: subprocess.Popen[str]

    def kill(self) -> None:
        """Kill the process with SIGKILL, which loses nothing that the Hub has acknowledged."""
        self.process.kill()
        self.process.wait()

    def client_environment(self, home: Path, **more: str) -> dict[str, str]:
        """Return the environment in which the public clients use this Hub, with `home` for their caches."""
        inherited = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
        return {
            **inherited,
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_TOKEN": TOKEN,
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            **more,
        }

    def create(self, repo_id: str) -> None:
        """Create a kernel repository."""
        organization, name = repo_id.split("/")
        described = {"name": name, "organization": organization, "type": "kernel"}
        requests.post(f"{self.url}/api/repos/create", json=described, headers=HEADERS, timeout=10).raise_for_status()

    def cpu_seconds(self) -> float:
        """Return the CPU time of the server."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def peak_bytes(self) -> int:
        """Return the peak resident memory of the server since its start or the last `reset_peak`."""
        peak = re.search(r"VmHWM:\s*(\d+) kB", Path(f"/proc/{self.process.pid}/status").read_text())
        assert peak is not None
        return int(peak[1]) * 1024

    def reset_peak(self) -> None:
        """Begin a new measurement of `peak_bytes`."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")


def start_hub(root: Path, *options: str, log: Path | None = None) -> HubProcess:
    """Start a Hub in `root` and wait until it accepts requests.

    Args:
        log: Where the server's log goes. [default: stderr]

    Raises:
        SystemExit: If it does not start; with its log.
    """
    command = [sys.executable, "-m", "kernel_builder", "hub", "serve", "--root", str(root), "--json", *options]
    if log is None:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    else:
        with log.open("w") as errors:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    assert process.stdout is not None
    ready = process.stdout.readline()
    if not ready:
        process.wait()
        raise SystemExit(f"the Hub did not start{':' if log else ''}\n{log.read_text() if log else ''}".strip())
    return HubProcess(json.loads(ready)["url"], process)


@contextmanager
def running_hub(root: Path, *options: str, log: Path | None = None) -> Iterator[HubProcess]:
    """Run a Hub in the context, as `start_hub` does."""
    hub = start_hub(root, *options, log=log)
    try:
        yield hub
    finally:
        hub.kill()
