"""`kernel-builder emulate`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from kernel_builder.config.project_files import read_project


@click.command()
@click.argument("directory", metavar="[DIR]", default=".", type=click.Path(path_type=Path))
@click.option(
    "--warp-size",
    type=click.Choice(["32", "64"]),
    default="32",
    show_default=True,
    help="The threads of a warp. 64 is for kernels for ROCm.",
)
@click.option(
    "--backend",
    type=click.Choice(["cuda", "rocm"]),
    help="The kernels to emulate. [default: rocm if there are any, else cuda]",
)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Where to write the emulated project. [default: a directory in the cache]",
)
@click.argument("pytest_arguments", metavar="[-- PYTEST_OPTION...]", nargs=-1, type=click.UNPROCESSED)
def emulate(
    directory: Path, warp_size: str, backend: str | None, output: Path | None, pytest_arguments: tuple[str, ...]
) -> None:
    """Run the tests of a project's CUDA or ROCm kernels on the CPU.

    DIR is the project (default: here). Its kernels are compiled for the CPU by g++, with an emulator that runs the
    threads of a block in turn. Tests get tensors on the CPU; those that need a GPU are skipped by the project's own
    conditions. Barriers that not all threads reach, indices out of bounds, lanes that are not in a mask and the like
    are errors that name the kernel, the block and the thread; docs/emulator.md lists what is found and what is not.

    \b
    kernel-builder emulate kernels/geglu
    kernel-builder emulate kernels/geglu --warp-size 64 -- -k forward
    """
    from kernel_builder.develop import emulate as emulator
    from kernel_format.cache_directory import default_cache

    project = read_project(directory)
    target = output or emulator.default_directory(project, backend, int(warp_size), default_cache())
    emulator.emulated(project, backend, int(warp_size), target)
    click.echo(f"{project.name}, emulated in {target}", err=True)
    sys.exit(emulator.run_tests(target, pytest_arguments))
