"""Runs programs with Torch, each in a fork of a process that has imported it, loaded no kernel, and not the client."""

from __future__ import annotations

import os
from subprocess import CompletedProcess

from tests.support.fork_server import ForkServer

_SERVER = ForkServer("torch", "torch._dynamo", "torch._inductor.config")


def run_with_torch(code: str, *arguments: object, **environment: str) -> CompletedProcess[str]:
    """Run a program as `python -c` does, with more variables of the environment, and return its output."""
    return _SERVER.run(code, [*map(str, arguments)], {**os.environ, **environment})


def output_with_torch(code: str, *arguments: object, **environment: str) -> str:
    """Run a program that has to succeed, and return its stdout without white space around it."""
    done = run_with_torch(code, *arguments, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()
