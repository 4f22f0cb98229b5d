"""`kernel-builder devshell`, `testshell`, `test-report` and `compile-commands`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from kernel_builder.cli.shared_options import directory_argument, owner_option, public_shell_options, toolchain_options
from kernel_builder.config.project_files import read_project
from kernel_builder.plural import counted
from kernel_builder.progress import shown

if TYPE_CHECKING:
    from kernel_builder.toolchain import Toolchains


class _ShellCommand(click.Command):
    """A command whose arguments after `--` are a command to run in a shell, so that they cannot be taken for DIR."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.params["command"] = tuple(args[at + 1 :])
        return super().parse_args(ctx, args[:at])

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND...]"]


@click.command(cls=_ShellCommand)
@directory_argument
@click.option("--variant", metavar="NAME", help="The variant to compile. [default: the one that fits the machine]")
@owner_option
@public_shell_options
@toolchain_options
def devshell(
    directory: Path, variant: str | None, owner: str | None, command: tuple[str, ...], **toolchain: Any
) -> None:
    """Start a shell with the compilers and headers of a variant, or run COMMAND with them.

    DIR is the project (default: here). The shell is $SHELL. nvcc of the pinned toolkit is on PATH; CUDA_HOME, CXX and
    CPLUS_INCLUDE_PATH are set. The default variant is the one that the installed Torch would load, or else the newest.

    \b
    kernel-builder devshell kernels/rmsnorm
    kernel-builder devshell kernels/rmsnorm -- nvcc --version
    """
    from kernel_builder.develop import choice, shells

    project = read_project(directory, owner)
    with shown(sys.stderr) as progress:
        toolchains = _toolchains(progress=progress, **toolchain)
        chosen = choice.to_develop(project, variant, toolchains)
        environment = shells.development(project, chosen, toolchains)
    _enter(f"compilers and headers of {project.name} {chosen.name}", environment, command)


@click.command(cls=_ShellCommand)
@directory_argument
@click.option("--variant", metavar="NAME", help="The variant to test. [default: the one that fits the machine]")
@click.option(
    "--torch-index",
    metavar="URL",
    help="Where pip finds Torch's builds, in URL/cpu, URL/cu130 and so on. [default: download.pytorch.org/whl]",
)
@owner_option
@public_shell_options
def testshell(
    directory: Path, variant: str | None, torch_index: str | None, owner: str | None, command: tuple[str, ...]
) -> None:
    """Start a shell to test a variant that has been built, or run COMMAND in it.

    DIR is the project (default: here). The shell is $SHELL. Its `python` has a Torch that loads the variant, `kernels`
    and pytest: it is the interpreter of kernel-builder if that has such a Torch, or else a virtual environment in the
    cache. `get_kernel` loads the package in DIR/build in place of the published one.

    \b
    kernel-builder testshell kernels/rmsnorm
    kernel-builder testshell kernels/rmsnorm -- python -m pytest kernels/rmsnorm/tests
    """
    from kernel_builder.develop import choice, interpreter, shells
    from kernel_format.cache_directory import default_cache

    project = read_project(directory, owner)
    chosen = choice.built(project, variant)
    with shown(sys.stderr) as progress:
        python = interpreter.find(
            project, chosen, default_cache(), progress, torch_index=torch_index or interpreter.TORCH_INDEX
        )
    _enter(f"{python} with {project.name} {chosen.name}", shells.testing(project, chosen, python), command)


@click.command("test-report")
@directory_argument
@click.option("--variant", metavar="NAME", help="The variant to test. [default: the one for this machine's hardware]")
@click.option(
    "--torch-index",
    metavar="URL",
    help="Where pip finds Torch's builds, in URL/cpu, URL/rocm7.2 and so on. [default: download.pytorch.org/whl]",
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write to this file, not to stdout.",
)
@owner_option
@click.argument("pytest_arguments", metavar="[PYTEST_OPTION]...", nargs=-1, type=click.UNPROCESSED)
def test_report(
    directory: Path,
    variant: str | None,
    torch_index: str | None,
    output: Path | None,
    owner: str | None,
    pytest_arguments: tuple[str, ...],
) -> None:
    """Run the tests of a project on this machine's hardware, and print a report as JSON.

    DIR is the project (default: here). The variant is built first, and tested with a Torch that loads it, as in
    `testshell`. The report has the hardware, the versions, the package's metadata, and the results of the tests. The
    exit status is 1 if a test has failed.

    \b
    kernel-builder test-report kernels/rmsnorm --output report.json
    kernel-builder test-report kernels/rmsnorm --variant torch-stable-abi210-rocm72-x86_64-linux -- -k forward
    """
    from kernel_builder.develop import interpreter
    from kernel_builder.develop.hardware_report import run

    project = read_project(directory, owner)
    with shown(sys.stderr) as progress:
        toolchains = _toolchains(progress=progress)
        index = torch_index or interpreter.TORCH_INDEX
        report = run(project, variant, toolchains, progress, torch_index=index, arguments=pytest_arguments)
    text = json.dumps(report, indent=2)
    if output:
        output.write_text(f"{text}\n", encoding="utf-8")
    else:
        click.echo(text)
    sys.exit(0 if report["status"] == 0 else 1)


def _enter(title: str, environment: dict[str, str], command: tuple[str, ...]) -> NoReturn:
    from kernel_builder.develop import shells

    if not command:
        click.echo(f"{title}; `exit` leaves this shell", err=True)
    shells.enter(environment, command)


@click.command("compile-commands")
@directory_argument
@click.option("--variant", metavar="NAME", help="Take the commands of this variant only.")
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write to this file. [default: DIR/compile_commands.json]",
)
@toolchain_options
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
    click.echo(f"{file}: {counted(count, 'file')}, as compiled for {', '.join(compiled.name for compiled in variants)}")


def _toolchains(**options: Any) -> Toolchains:
    from kernel_builder.toolchain import Toolchains

    return Toolchains(**options)
