"""`kernel-builder judge`."""

from __future__ import annotations

from pathlib import Path

import click

from kernel_builder.errors import ConfigError

_PATH = click.Path(path_type=Path)


@click.command()
@click.argument("candidate", metavar="CANDIDATE", type=_PATH)
@click.option("--task", metavar="TASK", type=_PATH, required=True, help="A problem file, or a directory with one.")
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as one JSON object.")
def judge(candidate: Path, task: Path, as_json: bool) -> None:
    """Say whether a candidate computes what a task asks for, and how fast."""
    raise ConfigError("the judge is not built in yet", where=str(candidate))
