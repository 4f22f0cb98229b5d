"""`kernel-builder fill-card`."""

from __future__ import annotations

from pathlib import Path

import click

from kernel_builder.cli.shared_options import directory_argument
from kernel_builder.config.project_files import read_project
from kernel_builder.hub import card
from kernel_builder.hub.package_api import Api
from kernel_builder.hub.packages import HubPackage


@click.command()
@directory_argument
@click.argument("output", metavar="[FILE]", required=False, type=click.Path(dir_okay=False, path_type=Path))
def fill_card(directory: Path, output: Path | None) -> None:
    """Print the card that `upload` would publish, or write it to FILE.

    DIR is the project (default: here). The card is CARD.md, followed by the API and the variants of the packages in
    DIR/build. The packages are read, not loaded.

    \b
    kernel-builder fill-card kernels/rmsnorm
    """
    project = read_project(directory)
    built = sorted(path.parent for path in project.root.glob("build/[!.]*/metadata.json"))
    packages = {path.name: HubPackage(path) for path in built}
    api = next(iter(packages.values())).api if packages else Api({}, {})
    text = card.render(project, project.hub_repo_id or f"org/{project.name}", packages, api)
    if output is None:
        click.echo(text, nl=False)
    else:
        output.write_text(text, encoding="utf-8")
