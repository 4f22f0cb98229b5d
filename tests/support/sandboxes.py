"""Test with a sandbox of a certain kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_sandbox.confine import BUBBLEWRAP, LANDLOCK
from tests.support.files import write_program

_REASONS = {
    BUBBLEWRAP: "bubblewrap is not installed, or may not be used",
    LANDLOCK: "Landlock is not there, or the network cannot be taken away",
}


def hide_bubblewrap(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process and those that it starts find a bubblewrap that does not work, as in some containers."""
    broken = write_program(directory / "without-bubblewrap" / "bwrap", "exit 1")
    monkeypatch.setenv("PATH", str(broken.parent), prepend=":")


def skip_unless(wanted: str | None, used: str | None) -> None:
    """Skip the test if this machine did not use the kind of sandbox that the test is for."""
    if wanted is not None and used != wanted:
        pytest.skip(_REASONS[wanted])
