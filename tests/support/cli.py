"""The command line in the process of the tests."""

from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from kernel_builder.cli import main


def invoke(*arguments: str | Path, **options: Any) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], **options)
