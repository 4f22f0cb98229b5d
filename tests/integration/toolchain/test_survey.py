"""`kernel-builder doctor` on machines with and without the needed tools."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from .conftest import COMMAND


def doctor(cache: Path, *arguments: str, **environment: str) -> tuple[int, dict[str, Any]]:
    kept = {name: value for name, value in os.environ.items() if name not in {"CXX", "CUDA_HOME"}}
    done = subprocess.run(
        [*COMMAND, "doctor", "--json", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**kept, "KERNEL_BUILDER_CACHE": str(cache), **environment},
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_a_complete_machine(cache: Path) -> None:
    code, report = doctor(cache)
    assert (code, report["ready"]) == (0, {"cpu": True, "cuda": True})
    values = {finding["name"]: finding["value"] for finding in report["findings"]}
    assert values["pinned toolchains"].startswith("0 of ")


def test_a_machine_without_a_compiler(cache: Path, tmp_path: Path) -> None:
    code, report = doctor(cache, PATH=str(tmp_path))
    assert (code, report["ready"]) == (1, {"cpu": False, "cuda": False})
    missing = {finding["name"]: finding["hint"] for finding in report["findings"] if not finding["ok"]}
    assert "apt-get install g++" in missing["g++"]
    assert "git" in missing, "optional requirements are listed too"
