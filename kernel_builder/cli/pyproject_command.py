"""`kernel-builder create-pyproject` and `clean-pyproject`."""

from __future__ import annotations

from pathlib import Path

import click

from kernel_builder.cli.shared_options import directory_argument
from kernel_builder.develop import wheel_backend


@click.command()
@directory_argument
@click.option("--force", "-f", is_flag=True, help="Replace an existing pyproject.toml.")
def create_pyproject(directory: Path, force: bool) -> None:
    """Write a pyproject.toml, so that pip builds and installs a project by calling kernel-builder.

    DIR is the project (default: here). pip builds the variant that fits the installed Torch. After an editable
    install, `kernel-builder build` updates the imported package.

    \b
    kernel-builder create-pyproject my-kernel
    pip install --no-build-isolation --editable my-kernel
    """
    click.echo(f"wrote {wheel_backend.create(directory, overwrite=force)}")


@click.command()
@directory_argument
@click.option("--dry-run", "-d", is_flag=True, help="Print the file that would be removed, and remove nothing.")
@click.option("--force", "-f", is_flag=True, help="Remove the file even if it has been changed.")
def clean_pyproject(directory: Path, dry_run: bool, force: bool) -> None:
    """Remove the pyproject.toml that `create-pyproject` writes.

    DIR is the project (default: here). A file with other content is kept, unless --force is given.

    \b
    kernel-builder clean-pyproject my-kernel
    """
    file = wheel_backend.clean(directory, overwrite=force, dry_run=dry_run)
    click.echo("nothing to remove" if file is None else f"{'would remove' if dry_run else 'removed'} {file}")
