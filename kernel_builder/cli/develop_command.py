"""`kernel-builder devshell`, `testshell` and `compile-commands`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kernel_builder.config.project_files import read_project
from kernel_builder.progress import shown

if TYPE_CHECKING:
    from kernel_builder.toolchain import Toolchains

_DIRECTORY = click.argument("directory", metavar="[DIR]", default=".", type=click.Path(path_type=Path))
_TOOLCHAIN = (
    click.option("--cuda-home", type=click.Path(path_type=Path), help="A CUDA toolkit to use for its version of CUDA."),
    click.option("--cxx", metavar="PROGRAM", help="The g++ to use. [default: $CXX, or else g++]"),
    click.option("--index-url", metavar="URL", help="Package index. [default: the one pip or uv is set to use]"),
    click.option("--offline", is_flag=True, help="Do not use the network; fail if something is missing."),
)


def _toolchain_options(command: Any) -> Any:
    for option in reversed(_TOOLCHAIN):
        command = option(command)
    return command


@click.command("compile-commands")
@_DIRECTORY
@click.option("--variant", metavar="NAME", help="Take the commands of this variant only.")
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write to this file. [default: DIR/compile_commands.json]",
)
@_toolchain_options
def compile_commands(directory: Path, variant: str | None, output: Path | None, **toolchain: Any) -> None:
    """Write compile_commands.json, with which clangd and other tools of editors understand a project's sources.

    DIR is the project (default: here). The commands are those of the variant that fits the installed Torch, or else of
    the newest one, and for sources of other backends those of the newest variant of that backend. They name the
    headers of the pinned toolchain, which is downloaded first if it is not in the cache. Commands of nvcc are
    translated to clang. Run this again after a change of `build.toml`.

    \b
    kernel-builder compile-commands kernels/rmsnorm
    clangd --check=kernels/rmsnorm/rmsnorm_cuda/forward.cu
    """
    from kernel_builder.develop import choice
    from kernel_builder.develop import compile_commands as editor

    project = read_project(directory)
    with shown(sys.stderr) as progress:
        toolchains = _toolchains(progress=progress, **toolchain)
        named = [choice.to_develop(project, variant, toolchains)] if variant else None
        variants = named or choice.of_each_backend(project, toolchains)
        file = output or project.root / editor.NAME
        count = editor.write(project, variants, toolchains, file)
    click.echo(f"{file}: {count} files, as compiled for {', '.join(one.name for one in variants)}")


def _toolchains(**options: Any) -> Toolchains:
    from kernel_builder.toolchain import Toolchains

    return Toolchains(**options)
