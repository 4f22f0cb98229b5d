"""`kernel-builder list-variants`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from kernel_builder.build.buildable import obstacle
from kernel_builder.config import changed, offered
from kernel_builder.config.project_files import read_project
from kernel_builder.config.variant import this_platform


@click.command()
@click.argument("directories", metavar="[DIR]...", nargs=-1, type=click.Path(path_type=Path))
@click.option("--arch", is_flag=True, help="Only variants for this machine's platform, and Python-only ones.")
@click.option("--all", "whole", is_flag=True, help="The whole matrix, not only what the Hub asks for.")
@click.option("--cuda-home", type=click.Path(path_type=Path), help="A CUDA toolkit to count with.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON, with what stands in the way of each.")
@click.option("--runners", is_flag=True, help="Print as JSON, on one line, what each of several runners is to build.")
@click.option(
    "--changed-since", metavar="COMMIT", help="Only projects that differ from this commit of their git repository."
)
@click.option(
    "--shared",
    multiple=True,
    metavar="PATH",
    type=click.Path(path_type=Path),
    help="With --changed-since: a file or directory whose change touches every project. May be repeated.",
)
def list_variants(
    directories: tuple[Path, ...],
    arch: bool,
    whole: bool,
    cuda_home: Path | None,
    as_json: bool,
    runners: bool,
    changed_since: str | None,
    shared: tuple[Path, ...],
) -> None:
    """List the variants that the projects in DIR (default: here) have to offer, and which this machine can build.

    With --runners, what is printed is the matrix of a GitHub workflow: one entry for each project, platform and
    backend, to be built by `kernel-builder build PROJECT --backend BACKEND` on a runner of that platform.

    With --changed-since, projects are left out if neither their files nor those that their symbolic links lead to
    differ between HEAD and the last common ancestor with COMMIT.

    \b
    kernel-builder list-variants kernels/* --changed-since origin/main
    """
    from kernel_builder.toolchain import Toolchains

    directories = directories or (Path(),)
    if changed_since is not None:
        directories = tuple(changed.touched(directories, changed_since, shared))
    found = [(directory, read_project(directory)) for directory in directories]
    if runners:
        parts = [part for directory, project in found for part in offered.shares(str(directory), project, whole=whole)]
        click.echo(json.dumps({"include": [asdict(part) for part in parts]}))
        return
    toolchains = Toolchains(cuda_home=cuda_home)
    rows = []
    for _, project in found:
        for variant in offered.variants(project, whole=whole):
            if arch and variant.platform not in {None, this_platform()}:
                continue
            missing = obstacle(variant, toolchains)
            rows.append(
                {
                    "project": project.name,
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
        name = f"{row['project']}/{row['variant']}" if len(found) > 1 else row["variant"]
        click.echo(name, nl=bool(row["buildable"]))
        if not row["buildable"]:
            click.secho(f"  (not here: {row['reason']}; {row['hint']})", fg="yellow")
    for _, project in found:
        for backend in offered.skipped_backends(project):
            click.secho(f"{project.name}: {backend}: not built by this builder", fg="yellow", err=True)
