"""`kernel-builder devshell`, `testshell`, `emulate` and `create-pyproject`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

import click

from kernel_builder.cli.shared_options import directory_argument, public_shell_options
from kernel_builder.config.ownership import VARIABLE
from kernel_builder.config.project import Project
from kernel_builder.config.project_files import read_project
from kernel_builder.develop import choice, shells, wheel_backend
from kernel_builder.develop import emulate as emulator
from kernel_builder.pipeline import exclusive
from kernel_builder.progress import Lines, shown
from kernel_builder.toolchain import Toolchains
from kernel_format.cache_directory import default_cache

_variant_option = click.option(
    "--variant", metavar="NAME", help="The variant to use. [default: the one that fits this machine]"
)


class _ShellCommand(click.Command):
    """A command whose arguments after `--` are a command to run in a shell, so that they cannot be taken for DIR."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.params["command"] = tuple(args[at + 1 :])
        return super().parse_args(ctx, args[:at])

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND...]"]


def _read(directory: Path) -> Project:
    """Read the project as its owner publishes it, since a shell sets the repository's name in `LOCAL_KERNELS`."""
    return read_project(directory, os.environ.get(VARIABLE))


@click.command(cls=_ShellCommand)
@directory_argument
@_variant_option
@public_shell_options
def devshell(directory: Path, variant: str | None, command: tuple[str, ...]) -> None:
    """Start a shell with the compilers and headers of a variant, or run COMMAND with them.

    DIR is the project (default: here). The shell is $SHELL. PATH contains the nvcc of the pinned toolkit, or of
    $CUDA_HOME. CUDA_HOME, CXX and CPLUS_INCLUDE_PATH are set. The default variant is the one that the installed Torch
    loads, or else the newest.

    \b
    kernel-builder devshell kernels/rmsnorm
    kernel-builder devshell kernels/rmsnorm -- nvcc --version
    """
    project = _read(directory)
    with shown(sys.stderr) as progress:
        toolchains = Toolchains(progress=progress)
        chosen = choice.to_develop(project, variant, toolchains)
        environment = shells.development(project, chosen, toolchains)
    _enter(f"compilers and headers of {project.name} {chosen.name}", environment, command)


@click.command(cls=_ShellCommand)
@directory_argument
@_variant_option
@public_shell_options
def testshell(directory: Path, variant: str | None, command: tuple[str, ...]) -> None:
    """Start a shell to test a built variant, or run COMMAND in it.

    DIR is the project (default: here). The shell is $SHELL. Its `python` is the interpreter of kernel-builder, whose
    Torch must load the variant. `get_kernel` loads the package in DIR/build in place of the published one.

    \b
    kernel-builder testshell kernels/rmsnorm
    kernel-builder testshell kernels/rmsnorm -- python -m pytest kernels/rmsnorm/tests
    """
    project = _read(directory)
    chosen = choice.built(project, variant)
    choice.require_loadable(chosen)
    _enter(f"{sys.executable} with {project.name} {chosen.name}", shells.testing(project, chosen), command)


def _enter(title: str, environment: dict[str, str], command: tuple[str, ...]) -> NoReturn:
    if not command:
        click.echo(f"{title}; `exit` leaves this shell", err=True)
    shells.enter(environment, command)


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

    DIR is the project (default: here). g++ compiles the kernels for the CPU, with an emulator that runs a block's
    threads in turn. Tests get CPU tensors; the project's own conditions skip tests that need a GPU. Barriers that not
    all threads reach, indices out of bounds, lanes outside a mask and similar faults are errors that name the kernel,
    the block and the thread; docs/emulator.md lists the faults that are found and those that are not.

    \b
    kernel-builder emulate kernels/geglu
    kernel-builder emulate kernels/geglu --warp-size 64 -- -k forward
    """
    project = read_project(directory)
    target = emulator.default_directory(project, backend, int(warp_size), default_cache())
    with exclusive(target, default_cache(), Lines(sys.stderr)):
        emulator.emulated(project, backend, int(warp_size), target)
        click.echo(f"{project.name}, emulated in {target}", err=True)
        sys.exit(emulator.run_tests(target, pytest_arguments))


@click.command()
@directory_argument
@click.option("--force", "-f", is_flag=True, help="Replace an existing pyproject.toml.")
def create_pyproject(directory: Path, force: bool) -> None:
    """Write a pyproject.toml, so that pip builds and installs a project by calling kernel-builder.

    DIR is the project (default: here). pip builds the variant that fits the installed Torch. After an editable
    install, `kernel-builder build` updates the imported package.

    \b
    kernel-builder create-pyproject my-kernel
    pip install --no-build-isolation --editable my-kernel
    """
    click.echo(f"wrote {wheel_backend.create(directory, overwrite=force)}")
