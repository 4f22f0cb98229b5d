"""Shared by `models.py`, `generate.py` and `training.py`: options, packages, the machine, and the file of results."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import recording
import torch

KERNELS = ("adaln", "blocks", "decode", "geglu", "loss", "rmsnorm", "rope3d")


def case_parser(about: str, cases: Iterable[str], variants: Sequence[str]) -> argparse.ArgumentParser:
    """Return a parser of the options that `models.py`, `generate.py` and `training.py` share."""
    parser = argparse.ArgumentParser(description=about.partition("\n")[0])
    parser.add_argument("--case", action="append", choices=list(cases), help="Only this case; may be repeated.")
    parser.add_argument("--variant", action="append", choices=variants, help="Only this variant; may be repeated.")
    parser.add_argument("--json", type=Path, required=True, help="Add the results to this file.")
    parser.add_argument("--layers", type=int, help="Use as many layers as this, to try the script.")
    return parser


def kernel(name: str) -> Any:
    """Return a package of kernels-community."""
    from kernels import get_kernel

    return get_kernel(f"kernels-community/{name}", version=1)


def machine(*libraries: str) -> dict[str, str]:
    """Return the GPU, and the versions of Torch and of other libraries."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {"device": name, "torch": torch.__version__, **{library: version(library) for library in libraries}}


def commits() -> dict[str, str]:
    """Return the commit that each package records; it ends in `-dirty` if the sources had changes."""
    recorded = {}
    for name in KERNELS:
        metadata = json.loads((Path(kernel(name).__file__).parent / "metadata.json").read_text())
        source = (metadata.get("provenance") or {}).get("kernel") or {}
        recorded[name] = str(source.get("commit", "unknown"))[:12] + ("-dirty" if source.get("dirty") else "")
    return recorded


def describe(path: Path, report: dict[str, Any], *libraries: str) -> None:
    """Record the machine and the packages in a report.

    Raises:
        SystemExit: If the report has figures of others.
    """
    for key, value in (("machine", machine(*libraries)), ("commits", commits())):
        if report.setdefault(key, value) != value:
            raise SystemExit(f"{path} has figures with another {key!r}: name another file with --json")


def update(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the report in a file, which is empty if there is no file."""
    report = json.loads(path.read_text()) if path.exists() else {}
    change(report)
    recording.write(path, report)
