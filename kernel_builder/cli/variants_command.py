"""`kernel-builder list-variants`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from kernel_builder.cli import of_each, print_notices, report_error
from kernel_builder.cli.shared_options import print_reasons, whole_option
from kernel_builder.config import changed, offered
from kernel_builder.config.build_toml import FILE
from kernel_builder.config.project import Project
from kernel_builder.config.project_files import read_project
from kernel_builder.config.variant import this_platform
from kernel_builder.steps.buildable import obstacle
from kernel_builder.toolchain import Toolchains
from kernel_format.errors import ConfigError


@click.command()
@click.argument("directories", metavar="[DIR]...", nargs=-1, type=click.Path(path_type=Path))
@click.option("--arch", is_flag=True, help="Only variants for this machine's platform, and Python-only ones.")
@whole_option
@click.option("--json", "as_json", is_flag=True, help="Print as JSON, with each variant's obstacle.")
@click.option("--runners", is_flag=True, help="Print a job for each CI runner, as JSON on one line.")
@click.option(
    "--changed-since", metavar="COMMIT", help="Only projects with changes committed since HEAD left COMMIT's history."
)
@click.option(
    "--shared",
    multiple=True,
    metavar="PATH",
    type=click.Path(path_type=Path),
    help="With --changed-since: a file or directory whose change selects every project; may be repeated.",
)
def list_variants(
    directories: tuple[Path, ...],
    arch: bool,
    whole: bool,
    as_json: bool,
    runners: bool,
    changed_since: str | None,
    shared: tuple[Path, ...],
) -> None:
    """List the variants of the projects in DIR (default: here), and which of them this machine can build.

    With several DIR, those without a build.toml are skipped, and an error in one does not stop the others.

    With --runners, the output is the matrix of a GitHub workflow. It has one entry for each project, platform and
    backend, which `kernel-builder build PROJECT --backend BACKEND` builds on a runner of that platform.
    """
    if changed_since is not None:
        several = len(directories) > 1
        paths = [path for path in directories or [Path()] if (path / FILE).exists() or not (several and path.exists())]
        directories = tuple(changed.touched(paths, changed_since, shared))
    projects, errors = of_each(directories, read_project) if directories or changed_since is None else ({}, {})
    for error in errors.values():
        report_error(error, as_json=False)
    print_notices(list(projects.values()))
    if runners:
        parts = [
            part
            for directory, project in projects.items()
            for part in offered.shares(str(directory), project, whole=whole)
        ]
        click.echo(json.dumps({"include": [asdict(part) for part in parts]}))
    else:
        toolchains = Toolchains()
        rows = [row for project in projects.values() for row in _rows(project, toolchains, arch=arch, whole=whole)]
        if as_json:
            click.echo(json.dumps(rows, indent=2))
        else:
            _print(rows, several=len(projects) + len(errors) > 1)
    if errors:
        raise SystemExit(ConfigError.exit_code)


def _rows(project: Project, toolchains: Toolchains, *, arch: bool, whole: bool) -> Iterator[dict[str, Any]]:
    """Yield the variants of a project as `--json` prints them."""
    for variant in offered.variants(project, whole=whole):
        if arch and variant.platform not in {None, this_platform()}:
            continue
        missing = obstacle(project, variant, toolchains)
        yield {
            "project": project.name,
            "variant": variant.name,
            "backend": variant.backend.name,
            "platform": variant.platform,
            "cuda": None,  # part of the format: it was there before other backends had releases
            **({variant.backend.name: str(variant.release)} if variant.release else {}),
            "buildable": missing is None,
            "reason": missing.reason if missing else None,
            "hint": missing.hint if missing else None,
        }


def _print(rows: Sequence[Mapping[str, Any]], *, several: bool) -> None:
    """Print one line for each variant, and each obstacle once."""
    missing = []
    for row in rows:
        name = f"{row['project']}/{row['variant']}" if several else row["variant"]
        click.echo(name, nl=bool(row["buildable"]))
        if not row["buildable"]:
            click.secho("  (not here)", fg="yellow")
            missing.append((name, row["reason"], row["hint"]))
    print_reasons("not here", missing, err=True)
