"""Test with a sandbox of a certain kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_sandbox.confine import BUBBLEWRAP, LANDLOCK

_REASONS = {
    BUBBLEWRAP: "bubblewrap is not installed, or may not be used",
    LANDLOCK: "Landlock is not there, or the network cannot be taken away",
}


def hide_bubblewrap(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process and those that it starts find a bubblewrap that does not work, as in some containers."""
    programs = directory / "without-bubblewrap"
    programs.mkdir()
    (programs / "bwrap").write_text("#!/bin/sh\nexit 1\n")
    (programs / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=":")


def skip_unless(wanted: str | None, used: str | None) -> None:
    """Skip the test if this machine did not use the kind of sandbox that the test is for."""
    if wanted is not None and used != wanted:
        pytest.skip(_REASONS[wanted])
