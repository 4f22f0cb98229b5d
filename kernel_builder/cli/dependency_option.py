"""The option `--dependency NAME=DIR` of the commands that need to know what can be built."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click


def _parse(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> Mapping[str, Path]:
    from kernel_builder.toolchain.dependencies import parse_given

    return dict(parse_given(value, "--dependency") for value in values)


dependency_option = click.option(
    "--dependency",
    "dependencies",
    multiple=True,
    metavar="NAME=DIR",
    callback=_parse,
    help="A directory with a library that `depends` names, e.g. cutlass_4_5=/opt/cutlass; may be given again. "
    "$KERNEL_BUILDER_DEPENDENCIES holds such entries too, separated by colons.",
)
