"""The C functions of Torch's stable ABI, as its headers declare them for a release."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from kernel_builder.config.variant import Release

_HEADERS = ("inductor/aoti_torch/c/shim.h", "inductor/aoti_torch/generated/c_shim_aten.h", "stable/c/shim.h")


def exported(include: Path, release: Release, *, cuda: bool, cxx: str = "g++") -> set[str]:
    """Return the functions that headers declare for the stable ABI of a release, with those of CUDA or without.

    Args:
        include: Torch's include directory, of this release or a later one.
        cxx: The g++ that preprocesses them.
    """
    target = f"-DTORCH_TARGET_VERSION=(({release.major}ULL<<56)|({release.minor}ULL<<48))"
    command = [cxx, "-E", "-P", "-std=c++20", f"-I{include}", target, *(["-DUSE_CUDA"] if cuda else []), "-x", "c++"]
    text = subprocess.run(
        [*command, "-"],
        input="".join(f"#include <torch/csrc/{header}>\n" for header in _HEADERS),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    names = re.findall(r'__visibility__\("default"\)\)\)[^;(]*?\b(\w+)\s*\(', text)
    return {name for name in names if "_mps_" not in name}
