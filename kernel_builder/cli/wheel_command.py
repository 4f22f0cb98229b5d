"""`kernel-builder wheel`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from kernel_builder.cli.shared_options import (
    allow_option,
    directory_argument,
    json_option,
    load_option,
    owner_option,
)
from kernel_builder.progress import Lines, Silent
from kernel_builder.wheel import write_wheels


@click.command()
@directory_argument
@click.option("--out", metavar="DIR", type=click.Path(path_type=Path), help="Where to write. [default: DIR/dist]")
@click.option("--name", metavar="NAME", help="The name in the package index. [default: the name in build.toml]")
@click.option(
    "--version",
    metavar="N.M",
    help="The version in the package index; N is the version of build.toml. [default: N.0]",
)
@owner_option
@load_option
@allow_option
@json_option
def wheel(directory: Path, as_json: bool, **options: Any) -> None:
    """Write wheels of a project, for pip and uv.

    DIR is the project (default: here). A wheel has all packages of DIR/build for one platform, and selects one at
    import by the rule of get_kernel. It needs Torch, but not the Hub's client. `wheel` runs the checks of `upload`
    first. Equal packages give equal bytes.

    A package index accepts each version once: pass the next one as --version. One process can use both
    `import my_kernel` and get_kernel.

    \b
    kernel-builder build kernels/rmsnorm
    kernel-builder wheel kernels/rmsnorm --version 1.3
    pip install --no-deps kernels/rmsnorm/dist/rmsnorm-1.3-py3-none-manylinux_2_28_x86_64.whl
    """
    written = write_wheels(directory, Silent() if as_json else Lines(sys.stderr), **options)
    if as_json:
        click.echo(json.dumps({"wheels": [archive.as_dict() for archive in written]}, indent=2))
    else:
        for archive in written:
            click.echo(f"wrote {archive.path}  ({archive.path.stat().st_size / 2**20:.2f} MiB)")
            click.echo(f"  {', '.join(archive.variants)}; needs {', '.join(archive.requires)}")
