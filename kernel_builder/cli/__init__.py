"""The command line. A command parses its arguments, calls one function, and prints the result.

A command's module is imported when the command is called.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TextIO, TypeVar, cast

import click

import kernel_builder
from kernel_builder import network, toml_file
from kernel_builder.cli.plugins import PluginGroup
from kernel_builder.config.build_toml import FILE
from kernel_builder.config.notices import notices
from kernel_builder.config.project import Project
from kernel_builder.config.toml_schema import nearest
from kernel_builder.plural import some_of
from kernel_builder.progress import PrintableStream
from kernel_format.errors import BuildError, ConfigError, KernelBuilderError, system_error

_COMMANDS = toml_file.read(Path(__file__).with_name("commands.toml"))
_Result = TypeVar("_Result")

_OUTPUT_LINES = 40  # of a compiler, before its log is named
_NAMES = 4  # of paths in a message


def report_error(error: KernelBuilderError, *, as_json: bool) -> None:
    """Print an error as text on stderr, or as one JSON object on stdout."""
    if as_json:
        click.echo(json.dumps(error.as_dict()))
        return
    if isinstance(error, BuildError) and error.output:
        # The compiler's output comes first: the user has to act on it.
        printed = error.output.rstrip("\n").splitlines()
        click.echo("\n".join(printed[:_OUTPUT_LINES]), err=True)
        if printed[_OUTPUT_LINES:]:
            click.echo(f"... and {len(printed) - _OUTPUT_LINES} more lines", err=True)
    click.secho("error: ", fg="red", bold=True, nl=False, err=True)
    click.echo(str(error), err=True)
    if isinstance(error, BuildError) and error.log:
        click.echo(f"  the command and all of its output: {error.log}", err=True)
    elif isinstance(error, BuildError) and error.command:
        click.echo(f"  command: {error.command}", err=True)
    if error.hint:
        click.secho("  hint: ", fg="cyan", nl=False, err=True)
        click.echo(error.hint, err=True)


def print_notices(projects: Sequence[Project]) -> None:
    """Print the notices of projects on stderr."""
    for line in notices(projects):
        click.secho(f"warning: {line}", fg="yellow", err=True)


def of_each(
    directories: Sequence[Path], read: Callable[[Path], _Result]
) -> tuple[dict[Path, _Result], dict[Path, ConfigError]]:
    """Return the results for project directories (default: here), and the errors; of a single one, raise its error.

    A shell expands `kernels-repo/*` to files and to directories without a `build.toml` too, which are left out.
    """
    paths = list(directories or [Path()])
    others = [path for path in paths if path.exists() and not (path / FILE).exists()] if len(paths) > 1 else []
    if others:
        names = some_of([path.name for path in others], _NAMES)
        click.secho(f"skipped, without a build.toml: {names}", fg="yellow", err=True)
    results, errors = {}, {}
    for path in (path for path in paths if path not in others):
        try:
            results[path] = read(path)
        except ConfigError as error:
            if len(paths) == len(others) + 1:
                raise
            errors[path] = error
    return results, errors


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    """Exit with an exception, so that compilers are stopped and staging directories are removed."""
    sys.exit(128 + number)


class MainGroup(PluginGroup):
    """The group of all commands. It prints users' errors without a traceback."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        os.umask(os.umask(0o077) | 0o002)  # other users must not replace compilers and objects in the cache
        out, err = (PrintableStream(stream) for stream in (sys.stdout, sys.stderr))
        with redirect_stdout(cast("TextIO", out)), redirect_stderr(cast("TextIO", err)):
            return super().main(*args, **kwargs)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            close = nearest(name, self.list_commands(ctx))
            meant = f"did you mean `{close}`?" if close else "--help lists all commands"
            raise click.UsageError(f"No such command {name!r}: {meant}", ctx)
        resolved, command, rest = super().resolve_command(ctx, args)
        own = command.params if command and not ctx.resilient_parsing else []
        needed = [
            entry for entry in own if isinstance(entry.type, click.Path) and getattr(entry, "flag_value", "") != ""
        ]
        paths = {option for entry in needed for option in entry.opts}
        for word, value in pairwise(rest[: rest.index("--")] if "--" in rest else rest):
            if word in paths and value.startswith("--"):
                raise click.UsageError(f"Option {word!r} requires a path, and {value!r} is an option.", ctx)
        return resolved, command, rest

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands by section."""
        sections = {title: list(commands) for title, commands in _COMMANDS["sections"].items()}
        sections["Agents"] += [name for name in self.list_commands(ctx) if name not in self.own]
        for title, names in sections.items():
            commands = [(name, self.get_command(ctx, name)) for name in names]
            rows = [(name, command.get_short_help_str(60)) for name, command in commands if command is not None]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def invoke(self, ctx: click.Context) -> Any:
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _exit)
        try:
            network.trust_certificates()
            return super().invoke(ctx)
        except KernelBuilderError as error:
            self._stop(ctx, error)
        except BrokenPipeError:  # the reader of our output has ended; click exits quietly
            raise
        except OSError as error:
            self._stop(ctx, system_error(error))

    def _stop(self, ctx: click.Context, error: KernelBuilderError) -> NoReturn:
        command = self.get_command(ctx, ctx.invoked_subcommand or "")
        into_file = command is not None and any(option.name == "json_file" for option in command.params)
        json_options = {"--output-json"} if into_file else {"--json", "--output-json"}
        given = sys.argv[: [*sys.argv, "--"].index("--")]  # the rest is another program's
        report_error(error, as_json=not json_options.isdisjoint(given))
        ctx.exit(error.exit_code)


@click.group(
    cls=MainGroup,
    own={command: target for commands in _COMMANDS["sections"].values() for command, target in commands.items()},
    hidden_commands=_COMMANDS["hidden"],
    entry_points="kernel_builder.commands",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(kernel_builder.__version__, prog_name="kernel-builder")
def main() -> None:
    """Build, check and publish compute kernels for PyTorch.

    \b
    kernel-builder doctor                       check that this machine can build kernels
    kernel-builder init org/my-kernel           create a project that is ready to build
    kernel-builder build my-kernel              build every variant into my-kernel/build/
    kernel-builder benchmark my-kernel          compare the kernel with PyTorch
    kernel-builder upload my-kernel             publish the packages to org/my-kernel on the Hub
    kernel-builder wheel my-kernel              write a wheel of them, for pip and uv
    """
