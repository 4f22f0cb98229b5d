"""Fixtures that run a real Hub on a loopback port, each on a directory of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import pytest
from huggingface_hub import HfApi


@dataclass
class RunningHub:
    """A Hub in a separate process."""

    url: str
    root: Path
    process: subprocess.Popen[str]
    log: Path
    environment: dict[str, str] = field(default_factory=dict)

    def api(self, token: str | None = "any") -> HfApi:
        """Return the public client for this Hub; `token=None` sends no token."""
        return HfApi(endpoint=self.url, token=token or False)

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Stop the process with SIGTERM, as an operator does."""
        self.process.terminate()
        self.process.wait(timeout=20)


@pytest.fixture(scope="session", autouse=True)
def xet_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the client's Xet cache of these Hubs apart from the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_XET_CACHE", str(tmp_path_factory.mktemp("xet")))
        yield


_number = count()


@contextmanager
def running_hub(directory: Path, *arguments: str, root: Path | None = None, **environment: str) -> Iterator[RunningHub]:
    """Run a Hub in the context. Its log, and a home directory for clients, are in `directory`."""
    root = root or directory / "hub"
    log = directory / f"hub-{next(_number)}.log"
    code = "from kernel_builder.cli import main; main()"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", code, "hub", "serve", "--root", str(root), "--json", *arguments],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **environment},
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, f"the Hub did not start: {log.read_text()}"
        url = json.loads(line)["url"]
        client = {"HF_ENDPOINT": url, "HF_HOME": str(directory / "home"), "HF_TOKEN": "any"}
        yield RunningHub(url, root, process, log, {**os.environ, **client, "HF_HUB_DISABLE_PROGRESS_BARS": "1"})
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def start_hub(tmp_path: Path) -> Iterator[Callable[..., RunningHub]]:
    """A function that starts Hubs: `start_hub("--trust", "org", root=…)`. All are killed after the test."""
    with ExitStack() as started:

        def start(*arguments: str, root: Path | None = None, **environment: str) -> RunningHub:
            return started.enter_context(running_hub(tmp_path, *arguments, root=root, **environment))

        yield start


@pytest.fixture
def hub(start_hub: Callable[..., RunningHub]) -> RunningHub:
    """A Hub without tokens that trusts `kernels-community`."""
    return start_hub("--trust", "kernels-community")
