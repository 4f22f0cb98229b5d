"""Options, arguments and printed tables of several commands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from kernel_builder.config import known_backends
from kernel_builder.config.ownership import VARIABLE
from kernel_builder.plural import some_of

_Command = TypeVar("_Command")
_NAMED = 3  # variants named in a message; the rest is counted


def together(*options: Callable[[_Command], _Command]) -> Callable[[_Command], _Command]:
    """Return one decorator that adds options to a command, in the order in which `--help` lists them."""

    def add(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


directory_argument = click.argument("directory", metavar="[DIR]", default=".", type=click.Path(path_type=Path))
json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
max_size_option = click.option(
    "--max-size",
    type=click.FloatRange(min=0),
    default=10,
    show_default=True,
    metavar="GB",
    help="Refuse to download more than this from one repository.",
)
owner_option = click.option(
    "--owner",
    metavar="NAME",
    envvar=VARIABLE,
    help="The user or organization that publishes the project and its kernel-depends of the same owner. "
    f"[default: ${VARIABLE}, or else the owner in [general.hub] repo-id]",
)

whole_option = click.option(
    "--all", "whole", is_flag=True, help="Use the whole matrix, not only the variants that the Hub asks for."
)
# Options of the public tool, accepted for scripts.
_public_build_option = click.option("-L", "--print-build-logs", is_flag=True, hidden=True, expose_value=False)
public_shell_options = together(
    _public_build_option, click.option("--max-jobs", "--cores", type=int, hidden=True, expose_value=False)
)
# The variants to build: arguments of `BuildRequest`.
selection_options = together(
    click.option(
        "--variant", "variants", multiple=True, metavar="NAME", help="Build only this variant; may be repeated."
    ),
    click.option(
        "--backend", "backends", multiple=True, type=click.Choice(known_backends.NAMES), help="Build only this backend."
    ),
    whole_option,
    click.option(
        "-j", "--jobs", "--max-jobs", "--cores", "jobs", type=click.IntRange(min=1), help="Use at most this many cores."
    ),
    _public_build_option,
)

# Compilers and headers: arguments of `Toolchains`.
toolchain_options = together(
    click.option(
        "--cuda-home",
        type=click.Path(path_type=Path),
        help="A CUDA toolkit to use for its CUDA release. [default: $CUDA_HOME]",
    ),
    click.option(
        "--cuda-compiler",
        type=click.Choice(["nvcc", "clang"]),
        help="The compiler of all CUDA variants. [default: nvcc, and clang for CUDA 12 without --cuda-home]",
    ),
    click.option("--offline", is_flag=True, help="Do not use the network; fail if something is missing."),
)


# Checks of packages.
allow_option = click.option(
    "--allow", multiple=True, metavar="CHECK", help="Report the errors of this check as warnings; may be repeated."
)
load_option = click.option("--load/--no-load", default=True, help="Load each package that this machine can load.")


def table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def print_reasons(label: str, reasons: Iterable[tuple[str, str, str]], *, err: bool = False) -> None:
    """Print variants with the same reason and hint together."""
    names: dict[tuple[str, str], list[str]] = {}
    for name, reason, hint in dict.fromkeys(reasons):
        names.setdefault((reason, hint), []).append(name)
    for (reason, hint), listed in names.items():
        click.secho(f"{label}: {some_of(listed, _NAMED)}: {reason}", fg="yellow", err=err)
        if hint:
            click.echo(f"    {hint}", err=err)


def origins(provenance: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the lines that state where a package's sources and its builder come from."""
    lines = []
    for part, label in (("kernel", "sources"), ("kernel-builder", "builder")):
        state = [str(provenance[part][key]) for key in ("version", "commit") if key in provenance[part]]
        state += ["with uncommitted changes"] * bool(provenance[part].get("dirty"))
        lines.append(f"  {label:<11} {' '.join(state) or 'not recorded'}")
    return lines
