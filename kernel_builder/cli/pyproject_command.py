"""`kernel-builder create-pyproject`."""

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
