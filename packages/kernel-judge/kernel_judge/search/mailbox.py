"""The agent `mailbox:DIR`: announces a workspace in a directory, and ends when a file `DONE` is there.

It is a command like any other agent, so limits of time and disk hold. People, and assistants that are not
commands, take part in a search by it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kernel_format.files import write_atomically

_PREFIX = "mailbox:"
DONE = "DONE"
_POLL = 0.2  # seconds


def is_mailbox(agent: str) -> bool:
    """Return whether an agent is a mailbox."""
    return agent.startswith(_PREFIX)


def mailbox_command(agent: str) -> list[str]:
    """Return the command that stands for `mailbox:DIR`; the directory is relative to the current one."""
    directory = Path(agent.removeprefix(_PREFIX)).absolute()
    return [sys.executable, "-m", "kernel_judge.search.mailbox", str(directory)]


@contextmanager
def _announced(workspace: Path, directory: Path) -> Iterator[None]:
    """Have `DIR/RUN-ATTEMPT-TRY.json` name a workspace, and remove it at the end."""
    directory.mkdir(parents=True, exist_ok=True)
    for file in directory.glob("*.json"):  # of processes that met a limit
        if not Path(f"/proc/{json.loads(file.read_text())['process']}").exists():
            file.unlink(missing_ok=True)
    run, _, attempt, number, _ = workspace.parts[-5:]
    file = directory / f"{run}-{attempt}-{number}.json"
    prompt = workspace / "PROMPT.md"
    letter = {"workspace": str(workspace), "prompt": str(prompt), "done": str(workspace / DONE), "process": os.getpid()}
    write_atomically(file, json.dumps(letter, indent=1) + "\n")
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def main(directory: Path) -> None:
    """Wait until `DONE` is in the current directory, a workspace."""
    workspace = Path.cwd()
    with _announced(workspace, directory):
        while not (workspace / DONE).exists():
            time.sleep(_POLL)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
