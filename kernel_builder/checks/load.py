"""Check that the package loads with the public client, in a fresh process, on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from kernel_builder.checks.findings import CheckedPackage, Finding, NotApplicable
from kernel_builder.config.variant import Variant, this_platform
from kernel_builder.errors import VariantError

NAME = "load"
_SECONDS = 300


def check_load(package: CheckedPackage) -> Iterator[Finding]:
    variant = package.variant
    if variant is None:
        raise NotApplicable(f"{package.directory.name!r} is not a variant's name")
    if variant.platform not in (None, this_platform()):
        raise NotApplicable(f"the variant is for {variant.platform}, this machine is {this_platform()}")
    if package.metadata is None or not (package.directory / "__init__.py").is_file():
        raise NotApplicable("the package is not complete")
    if reason := rejections(_variants(package.directory.parent))[variant.name]:
        raise NotApplicable(reason)
    outcome, text = probe("load", str(package.directory))
    if outcome == "skipped":
        raise NotApplicable(text)
    if outcome == "failed":
        yield Finding(NAME, "__init__.py", f"the client cannot load the package: {text}", _hint(text))


def _variants(build: Path) -> tuple[str, ...]:
    """The variants in `build`, sorted by name."""
    names = []
    for directory in sorted(build.iterdir()):
        with contextlib.suppress(VariantError):
            names.append(Variant.parse(directory.name).name)
    return tuple(names)


@cache
def rejections(variants: tuple[str, ...], python: str = sys.executable) -> Mapping[str, str | None]:
    """Return why the client would reject each variant on this machine, or None if it would not.

    One process answers for all variants of a project, since importing Torch takes seconds.

    Args:
        python: The interpreter whose client and Torch are asked.
    """
    answer = probe("fits", *variants, python=python)
    return answer if isinstance(answer, dict) else dict.fromkeys(variants, f"the client cannot be asked: {answer[1]}")


def probe(question: str, *arguments: str, python: str = sys.executable) -> Any:
    """Run `probe.py` in a fresh interpreter, outside the current directory and without network.

    Returns:
        Its answer, or `("failed", reason)` if the process died or did not finish in time.
    """
    source = (Path(__file__).parent / "probe.py").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as empty:
        result = Path(empty) / "result.json"
        command = [python, "-B", "-X", "faulthandler", "-c", source, str(result), question, *arguments]
        try:
            process = subprocess.run(
                command,
                cwd=empty,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return "failed", f"no answer after {_SECONDS} seconds"
        if process.returncode == 0 and result.is_file():
            return json.loads(result.read_text(encoding="utf-8"))
        return "failed", _death(process)


def _death(process: subprocess.CompletedProcess[str]) -> str:
    if process.returncode < 0:
        return f"the process was killed by {signal.Signals(-process.returncode).name}"
    words = process.stderr.strip().splitlines()
    return f"the process ended with status {process.returncode}" + (f": {words[-1]}" if words else "")


def _hint(text: str) -> str:
    if "undefined symbol" in text:
        return "add the source that defines the symbol to `src` in build.toml"
    if "was killed by" in text:
        return "look at code that runs at load: static initialisers and op registrations"
    return "import the package's `__init__.py` by hand to see the full traceback"
