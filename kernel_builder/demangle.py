"""Demangle C++ symbols."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable


def demangle(names: Iterable[str]) -> dict[str, str]:
    """Map each name to its C++ declaration, or to itself if it is not mangled or `c++filt` is missing.

    `c++filt` is part of binutils, on which every g++ depends.
    """
    ordered = list(dict.fromkeys(names))
    program = shutil.which("c++filt")
    if program is None or not any(name.startswith("_Z") for name in ordered):
        return {name: name for name in ordered}
    lines = subprocess.run(
        [program], input="\n".join(ordered), capture_output=True, text=True, check=False
    ).stdout.splitlines()
    return dict(zip(ordered, lines, strict=True)) if len(lines) == len(ordered) else {name: name for name in ordered}
