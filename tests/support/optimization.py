"""A build.toml of `kernels/` with little optimization, for tests of whether compilers accept its sources."""

from __future__ import annotations

import re

_ADDED = {
    r"\[torch\]": 'cxx-flags = ["-O0"]',
    # nvcc takes the first for host code only; a ptxas without optimization takes longer for the longer code.
    'language = "cpp-cuda"': 'cuda-flags = ["-O0", "--Ofast-compile=max"]',
    'language = "cpp-rocm"': 'hip-flags = ["-O1"]',  # without any, device code spills registers, which is a finding
}


def without_optimization(text: str) -> str:
    """Return a build.toml with flags that leave out optimization, or most of it."""
    text = re.sub(r"(?m)^cxx-flags = \[", 'cxx-flags = ["-O0", ', text)
    for line, flags in _ADDED.items():
        text = re.sub(f"(?m)^{line}$", rf"\g<0>\n{flags}", text)
    return text
