"""Options that several commands have."""

from __future__ import annotations

import importlib.util

import click

from kernel_format.errors import ToolchainError

json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
minutes_option = click.option(
    "--minutes",
    type=click.FloatRange(min=0, min_open=True),
    default=30.0,
    show_default=True,
    help="The longest call of an agent.",
)


def notify(message: str) -> None:
    """Print a message about the course of the command to standard error."""
    click.echo(message, err=True)


def require_torch() -> None:
    """Check that Torch is installed, which tasks and candidates run in."""
    if importlib.util.find_spec("torch") is None:
        raise ToolchainError("Torch is not installed; tasks and candidates run in it", hint="pip install torch")
