"""A real Hub on a loopback port, on a directory of its own."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from huggingface_hub import HfApi

TOKEN = {"Authorization": "Bearer any"}  # as RunningHub.api() sends it

# A Hub imports for more than a second. Each Hub is a fork of a process that has only imported.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["kernel_builder.cli.hub_command", "kernel_hub.commands", "kernel_hub.serve"])


@dataclass
class RunningHub:
    """A Hub in a separate process."""

    url: str
    root: Path
    process: BaseProcess
    log: Path
    environment: dict[str, str] = field(default_factory=dict)

    def api(self, token: str | None = "any") -> HfApi:
        """Return the public client for this Hub; `token=None` sends no token."""
        return HfApi(endpoint=self.url, token=token or False)

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        self.process.kill()
        self.process.join()


def memory(hub: RunningHub) -> int:
    """Return the most memory that the Hub has had, in MB."""
    peak = re.search(r"VmHWM:\s*(\d+) kB", Path(f"/proc/{hub.process.pid}/status").read_text())
    assert peak
    return int(peak[1]) // 1000


_number = count()


@contextmanager
def running_hub(directory: Path, *arguments: str, root: Path | None = None, **environment: str) -> Iterator[RunningHub]:
    """Run a Hub in the context. Its log, and a home directory for clients, are in `directory`."""
    root = root or directory / "hub"
    log = directory / f"hub-{next(_number)}.log"
    command = ["hub", "serve", "--root", str(root), "--json", *arguments]
    log.touch()
    reader, writer = _FORKS.Pipe(duplex=False)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    started = (writer, log, command, Path.cwd(), {**os.environ, **environment}, files, bool(environment))
    process = _FORKS.Process(target=_serve, args=started, daemon=True)
    process.start()
    writer.close()
    try:
        with open(reader.fileno(), closefd=False) as printed:
            line = printed.readline()
        assert line, f"the Hub did not start: {log.read_text()}"
        url = json.loads(line)["url"]
        client = {"HF_ENDPOINT": url, "HF_HOME": str(directory / "home"), "HF_TOKEN": "any"}
        yield RunningHub(url, root, process, log, {**os.environ, **client, "HF_HUB_DISABLE_PROGRESS_BARS": "1"})
    finally:
        process.kill()
        process.join()
        reader.close()


def _serve(
    output: Connection,
    log: Path,
    command: Sequence[str],
    directory: Path,
    environment: Mapping[str, str],
    open_files: tuple[int, int],
    in_new_python: bool,
) -> None:
    """Run a command of the builder as a process that a test starts: with its directory, variables and limits."""
    from kernel_builder.cli import main

    os.dup2(output.fileno(), 1)
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), 2)
    os.chdir(directory)
    resource.setrlimit(resource.RLIMIT_NOFILE, open_files)
    if in_new_python:  # for variables that Python or a module reads at its start
        os.execve(sys.executable, [sys.executable, "-m", "kernel_builder", *command], environment)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["kernel-builder", *command]
    main()
