"""Runs the command line, each time in a fork of a process that has imported it, and not the client of the Hub."""

from __future__ import annotations

from collections.abc import Mapping
from subprocess import CompletedProcess

from tests.support.fork_server import ForkServer

# The client reads its settings when it is imported.
_SERVER = ForkServer("kernel_builder.cli.build_command", "kernel_builder.pipeline", "kernel_hub.commands")


def run_builder(environment: Mapping[str, str], *arguments: object, check: bool = False) -> CompletedProcess[str]:
    """Run `kernel-builder ARGUMENTS`; `check`: it has to succeed."""
    code = "from kernel_builder.cli import main; main(prog_name='kernel-builder')"
    done = _SERVER.run(code, [*map(str, arguments)], environment)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done
