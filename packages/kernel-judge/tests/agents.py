"""Agents that follow a script: `python agents.py KIND [TEXT [SECONDS]]` in a workspace, the prompt on standard input.

The candidates `good` and `wrong` are judged by their results; `quoted` writes any text, for the judge that reads the
verdict from it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

MODEL = """import torch


class ModelNew(torch.nn.Module):
    def forward(self, x):
        {body}
"""
BODIES = {"good": "return torch.nn.functional.hardswish(x)", "wrong": "return torch.relu(x)"}


def main(kind: str, text: str = "", seconds: str = "0") -> None:
    prompt = sys.stdin.read()
    assert prompt == Path("PROMPT.md").read_text()
    if kind == "hanging":
        # A process that leaves the session, the group and its parent, as a server would.
        subprocess.Popen(["sleep", "300"], start_new_session=True)
        time.sleep(300)
    if kind == "crashing":
        sys.exit("something went wrong")
    if kind == "escaping":
        # No mark, no group, no session, no parent; and it tries to end its guard first.
        if text:
            with suppress(OSError):
                os.kill(os.getppid(), signal.SIGKILL)
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.execve(sys.executable, [sys.executable, "-c", f"import time; time.sleep({seconds})"], {})
            os._exit(0)
        os.wait()
        return
    if kind == "forking":  # processes that start two others and end, until there were so many
        script = (
            "import os, sys, time\nfor depth in range(6):\n    os.fork()\nos.setsid()\n"
            "for again in range(40):\n    time.sleep(.02)\n    os.fork() and os._exit(0)\ntime.sleep(300)\n"
        )
        subprocess.Popen([sys.executable, "-c", script, seconds], env={})
        time.sleep(300)
    if kind == "filling":
        while True:
            Path(f"more-{time.monotonic_ns()}").write_bytes(bytes(1 << 20))
            time.sleep(0.002)
    if kind == "deep":  # the path of the last is longer than Linux accepts
        for _ in range(3000):
            Path("d").mkdir()
            os.chdir("d")
        time.sleep(300)
    if kind == "odd":  # files that cannot be copied
        os.mkfifo("kernel/pipe")
        return
    if kind == "greedy":
        held = bytes(4_000_000_000)
        raise AssertionError(len(held))
    if kind == "quoted":
        time.sleep(float(seconds))
        Path("candidate.py").write_text(text.format(workspace=Path.cwd()))
    else:
        Path("candidate.py").write_text(MODEL.format(body=BODIES[kind]))


if __name__ == "__main__":
    main(*sys.argv[1:])
