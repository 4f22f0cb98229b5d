"""`kernel-builder port`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kernel_builder.cli.shared_options import json_option

if TYPE_CHECKING:
    from kernel_builder.port.first_build_toml import Port

_SHOWN = 12  # remarks of a kind


@click.command()
@click.argument("setup", metavar="[SETUP.PY]", default="setup.py", type=click.Path(path_type=Path))
@click.option("--name", metavar="ORG/NAME", help="The Hub repository to publish the kernel to.")
@click.option("--dry-run", is_flag=True, help="Print the build.toml; write nothing.")
@json_option
def port(setup: Path, name: str | None, dry_run: bool, as_json: bool) -> None:
    """Write a first build.toml for a project of torch.utils.cpp_extension.

    SETUP.PY is read, and never run. Sources, include directories, flags, definitions and CUDA capabilities of its
    extensions become tables of build.toml. What is only known when setup.py runs is left out and listed with its line,
    and so is what has to change in the sources. Files that exist are kept. docs/port.md goes on from here.

    \b
    kernel-builder port setup.py --dry-run
    kernel-builder port setup.py --name org/my-kernel
    """
    from kernel_builder.port import first_build_toml, written_files

    path = setup / "setup.py" if setup.is_dir() else setup
    ported = first_build_toml.port(path, name)
    written = [] if dry_run else written_files.write_new(ported.directory, ported.files)
    if as_json:
        click.echo(json.dumps({"written": written, **ported.as_dict()}))
        return
    if dry_run:
        click.echo(ported.files["build.toml"])
    _show(ported, path, written)


def _show(ported: Port, setup: Path, written: Sequence[str]) -> None:
    for kernel in ported.kernels:
        click.echo(
            f"understood {setup.name}:{kernel.line}: {kernel.name}, {kernel.backend}, sources: {len(kernel.src)}"
        )
    remarks = {
        "left out": [f"{setup.name}:{remark.line}: {remark.text}" for remark in ported.left_out],
        "assumed": [f"{setup.name}:{remark.line}: {remark.text}" for remark in ported.assumed],
        "to change": [f"{rewrite.path}:{rewrite.line}: {rewrite.text}" for rewrite in ported.rewrites],
        "to do": list(ported.notes),
    }
    for kind, lines in remarks.items():
        for line in lines[:_SHOWN]:
            click.echo(f"{kind}: {line}")
        if lines[_SHOWN:]:
            click.echo(f"{kind}: and {len(lines) - _SHOWN} more; --json has all")
    for name in written:
        click.echo(f"wrote {ported.directory / name}")
