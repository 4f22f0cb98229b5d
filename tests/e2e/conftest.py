"""Builds with the real compilers, through the command line, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

BUILDER = Path(sys.executable).with_name("kernel-builder")


@dataclass(frozen=True)
class Done:
    """What a command answered; `answer` is its JSON."""

    code: int
    answer: Any
    stderr: str


Run = Callable[..., Done]


def environment(cache: Path, **more: str) -> dict[str, str]:
    """The environment of a build with a cache of its own and no network."""
    return {**os.environ, "KERNEL_BUILDER_CACHE": str(cache), "HF_HUB_OFFLINE": "1", **more}


@pytest.fixture
def kernel_builder() -> Run:
    """Runs the command line with `--json`."""

    def run(cache: Path, *arguments: str | Path, **more: str) -> Done:
        command = [str(BUILDER), *map(str, arguments), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment(cache, **more))
        assert "Traceback" not in done.stderr, done.stderr
        return Done(done.returncode, json.loads(done.stdout) if done.stdout.strip() else None, done.stderr)

    return run
