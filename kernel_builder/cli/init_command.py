"""`kernel-builder init`."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

_BACKENDS = "--backends"


class _Init(click.Command):
    """Allows `--backends cpu cuda`; click's options take a fixed number of values."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        spread: list[str] = []
        inside = False
        for arg in args:
            if arg.startswith("-"):
                inside = arg.partition("=")[0] == _BACKENDS
            elif inside and spread[-1] != _BACKENDS:
                spread.append(_BACKENDS)
            spread.append(arg)
        return super().parse_args(ctx, spread)


@click.command(cls=_Init)
@click.argument("path", type=click.Path(path_type=Path), required=False)
@click.option("--name", metavar="ORG/NAME", required=True, help="The Hub repository to publish the kernel to.")
@click.option(
    _BACKENDS,
    multiple=True,
    default=("cpu", "cuda"),
    show_default=True,
    metavar="BACKEND...",
    help="The backends of the kernel: cpu, cuda.",
)
@click.option("--license", "licence", default="apache-2.0", show_default=True, help="The SPDX name of the licence.")
@click.option(
    "--kit",
    "on_kit",
    is_flag=True,
    help="Start from an operator on the kit, device code for several kernels; its files are copied into the project, "
    "or linked if ../kit in the same git repository has them.",
)
@click.option("--overwrite", is_flag=True, help="Replace existing files.")
def init(path: Path | None, name: str, backends: tuple[str, ...], licence: str, on_kit: bool, overwrite: bool) -> None:
    """Create a kernel project that is ready to build.

    The project has a ReLU operator to start from, with tests and a benchmark; with --kit it is a SiLU operator with
    vectorized loads, PDL and a launch table. PATH defaults to a directory with the name of the kernel.

    \b
    kernel-builder init --name org/my-kernel
    kernel-builder init kernels/my-kernel --name org/my-kernel --backends cuda --license mit
    kernel-builder init kernels/my-kernel --name org/my-kernel --kit
    """
    from kernel_builder.scaffold import create

    words = [word for value in backends for word in value.replace(",", " ").split()]
    directory = create(path, name, words, licence=licence, on_kit=on_kit, overwrite=overwrite)
    click.echo(f"Created {directory}. Next:")
    click.echo(f"  kernel-builder build {shlex.quote(str(directory))}")
    click.echo(f"  pytest {shlex.quote(str(directory / 'tests'))}")
