"""`kernel-builder emulate`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from kernel_builder.cli.shared_options import directory_argument
from kernel_builder.config.project_files import read_project
from kernel_builder.develop import emulate as emulator
from kernel_format.cache_directory import default_cache


@click.command()
@directory_argument
@click.option(
    "--warp-size",
    type=click.Choice(["32", "64"]),
    default="32",
    show_default=True,
    help="Threads in a warp. 64 is for ROCm kernels.",
)
@click.option(
    "--backend",
    type=click.Choice(["cuda", "rocm"]),
    help="The kernels to emulate. [default: rocm if there are any, else cuda]",
)
@click.argument("pytest_arguments", metavar="[-- PYTEST_OPTION...]", nargs=-1, type=click.UNPROCESSED)
def emulate(directory: Path, warp_size: str, backend: str | None, pytest_arguments: tuple[str, ...]) -> None:
    """Run the tests of a project's CUDA or ROCm kernels on the CPU.

    DIR is the project (default: here). g++ compiles its kernels for the CPU, with an emulator that runs the threads of
    a block in turn. Tests get tensors on the CPU; the project's own conditions skip tests that need a GPU. Barriers
    that not all threads reach, indices out of bounds, lanes outside a mask and similar faults are errors that name
    the kernel, the block and the thread; docs/emulator.md lists the faults that are found and those that are not.

    \b
    kernel-builder emulate kernels/geglu
    kernel-builder emulate kernels/geglu --warp-size 64 -- -k forward
    """
    project = read_project(directory)
    target = emulator.default_directory(project, backend, int(warp_size), default_cache())
    emulator.emulated(project, backend, int(warp_size), target)
    click.echo(f"{project.name}, emulated in {target}", err=True)
    sys.exit(emulator.run_tests(target, pytest_arguments))
