"""What `models.py` and `generate.py` have in common: the packages, the machine, and the file of results."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import result_files
import torch


def kernel(name: str) -> Any:
    """Return a package of kernels-community."""
    from kernels import get_kernel

    return get_kernel(f"kernels-community/{name}", version=1)


def machine(*packages: str) -> dict[str, str]:
    """Return the GPU, and the versions of Torch and of other packages."""
    from importlib.metadata import version

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {"device": name, "torch": torch.__version__, **{package: version(package) for package in packages}}


def packages() -> dict[str, Any]:
    """Return what packages record of their sources, which the page compares with those of the repository."""
    recorded = {}
    for name in ("adaln", "blocks", "decode", "geglu", "rmsnorm", "rope3d"):
        directory = Path(kernel(name).__file__).parent
        metadata = json.loads((directory / "metadata.json").read_text())
        recorded[name] = {
            "variant": directory.name,
            "provenance": metadata.get("provenance"),
            "python": {
                path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
                for path in sorted(directory.rglob("*.py"))
            },
        }
    return recorded


def say_of_what(path: Path, report: dict[str, Any], *libraries: str) -> None:
    """Let a report say of which machine and packages it is.

    Raises:
        SystemExit: If it has figures of others.
    """
    for what, here in (("machine", machine(*libraries)), ("packages", packages())):
        if report.setdefault(what, here) != here:
            raise SystemExit(f"{path} has figures with another value of {what!r}: write to another file, with --json")


def update(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the report in a file, which is empty if there is no file."""
    report = json.loads(path.read_text()) if path.exists() else {}
    change(report)
    result_files.write(path, report, sort_keys=True)
