"""A real Hub on a loopback port, over a directory of the test's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from huggingface_hub import HfApi


@dataclass
class RunningHub:
    """A Hub in a process of its own."""

    url: str
    root: Path
    process: subprocess.Popen[str]
    log: Path
    environment: dict[str, str] = field(default_factory=dict)

    def api(self, token: str | None = "any") -> HfApi:
        """The public client, pointed here; `token=None` sends none."""
        return HfApi(endpoint=self.url, token=token or False)

    def kill(self) -> None:
        """End it as the kernel ends a process: at once."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """End it as an operator does."""
        self.process.terminate()
        self.process.wait(timeout=20)


@pytest.fixture
def start_hub(tmp_path: Path) -> Iterator[Callable[..., RunningHub]]:
    """Starts Hubs: `start_hub("--trust", "org", root=…)`. All are ended after the test."""
    started: list[RunningHub] = []

    def start(*arguments: str, root: Path | None = None, **environment: str) -> RunningHub:
        root = root or tmp_path / "hub"
        log = tmp_path / f"hub-{len(started)}.log"
        process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "from kernel_builder.cli import main; main()",
                "hub",
                "serve",
                "--root",
                str(root),
                "--json",
                *arguments,
            ],
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
            env={**os.environ, **environment},
        )
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, f"the Hub did not start: {log.read_text()}"
        url = json.loads(line)["url"]
        home = tmp_path / "home"
        running = RunningHub(
            url,
            root,
            process,
            log,
            {
                **os.environ,
                "HF_ENDPOINT": url,
                "HF_HOME": str(home),
                "HF_TOKEN": "any",
                "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            },
        )
        started.append(running)
        return running

    yield start
    for running in started:
        running.process.kill()
        running.process.wait()


@pytest.fixture
def hub(start_hub: Callable[..., RunningHub]) -> RunningHub:
    """A Hub without tokens that trusts `kernels-community`."""
    return start_hub("--trust", "kernels-community")
