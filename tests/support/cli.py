"""The command line in the process of the tests."""

from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from kernel_builder.cli import main


def invoke(*arguments: str | Path, **options: Any) -> Result:
    """Run `kernel-builder ARGUMENTS`, which may end with any status, but with no traceback."""
    done = CliRunner().invoke(main, [str(argument) for argument in arguments], **options)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
    return done


def expect(status: int, text: str, *arguments: str | Path, **options: Any) -> Result:
    """Run a command that has to end with this status and print this text, on stderr if the status is 2."""
    done = invoke(*arguments, **options)
    assert done.exit_code == status and text in (done.stderr if status == 2 else done.output), done.output
    return done
