"""`kernel-builder list-variants`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from kernel_builder import matrix
from kernel_builder import project as projects
from kernel_builder.build import obstacle
from kernel_builder.variant import this_platform


@click.command()
@click.argument("directory", metavar="[DIR]", default=".", type=click.Path(path_type=Path))
@click.option("--arch", is_flag=True, help="Only variants for this machine's platform, and Python-only ones.")
@click.option("--all", "whole", is_flag=True, help="The whole matrix, not only what the Hub asks for.")
@click.option("--cuda-home", type=click.Path(path_type=Path), help="A CUDA toolkit to count with.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON, with what stands in the way of each.")
def list_variants(directory: Path, arch: bool, whole: bool, cuda_home: Path | None, as_json: bool) -> None:
    """List the variants that the project in DIR has to offer, and which of them this machine can build."""
    from kernel_builder.toolchain import Toolchains

    toolchains = Toolchains(cuda_home=cuda_home)
    project = projects.read(directory)
    rows = []
    for variant in matrix.variants(project, whole=whole):
        if arch and variant.platform not in {None, this_platform()}:
            continue
        missing = obstacle(variant, toolchains)
        rows.append(
            {
                "variant": variant.name,
                "backend": variant.backend,
                "platform": variant.platform,
                "cuda": str(variant.cuda) if variant.cuda else None,
                "buildable": missing is None,
                "reason": missing.reason if missing else None,
                "hint": missing.hint if missing else None,
            }
        )
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        click.echo(row["variant"], nl=bool(row["buildable"]))
        if not row["buildable"]:
            click.secho(f"  (not here: {row['reason']}; {row['hint']})", fg="yellow")
    for backend in matrix.skipped_backends(project):
        click.secho(f"{backend}: not built by this builder", fg="yellow", err=True)
