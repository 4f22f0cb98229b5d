"""Records results: the machine, the commit, and JSON files in which a row of a table is one line."""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
_LONGEST_LINE = 240


def commit() -> str:
    """Return the commit of this checkout, with `-dirty` if files have changed since."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def machine(*packages: str) -> dict[str, Any]:
    """Return the machine's hardware and system, and the versions of Python and of these packages."""
    model = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "cpu": model[1] if model else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.freedesktop_os_release().get("PRETTY_NAME", platform.platform()),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in packages},
    }


def children_cpu_seconds() -> float:
    """Return the CPU time of all processes that this one has started and waited for, user and system."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def write(path: Path, document: Any) -> None:
    """Replace a file by a value as JSON. A list or an object that fits in a line is on one."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(_formatted(document, "") + "\n")
    new.replace(path)


def _formatted(value: Any, margin: str) -> str:
    line = json.dumps(value)
    if not isinstance(value, (dict, list)) or not value or len(margin) + len(line) <= _LONGEST_LINE:
        return line
    inner = f"{margin} "
    if isinstance(value, dict):
        parts = [f"{inner}{json.dumps(key)}: {_formatted(entry, inner)}" for key, entry in value.items()]
        return "{\n" + ",\n".join(parts) + f"\n{margin}}}"
    return "[\n" + ",\n".join(inner + _formatted(entry, inner) for entry in value) + f"\n{margin}]"
