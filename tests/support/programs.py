"""Programs that tests run."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def run(*command: str | Path, **options: Any) -> str:
    """Run a command that has to succeed, and return its stdout."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def wait_for(condition: Callable[[], bool], seconds: float = 120) -> bool:
    """Return whether a condition becomes true within a time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return condition()
