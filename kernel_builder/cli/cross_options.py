"""Options of several commands: the compiler and the Python of another platform than this machine's."""

from __future__ import annotations

from pathlib import Path

import click

cross_cxx_option = click.option(
    "--cross-cxx", metavar="PROGRAM", help="The g++ for another platform. [default: its name, aarch64-linux-gnu-g++]"
)

cross_python_option = click.option(
    "--cross-python",
    type=click.Path(exists=True, dir_okay=False, executable=True, path_type=Path),
    metavar="PROGRAM",
    help="A Python of another platform with Torch and the client, run by qemu-user, to load its packages with.",
)
